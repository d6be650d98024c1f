// SPDX-License-Identifier: Apache-2.0
// The only exported function of libmuster-hdf5 makes an HDF5 file's structures from a plan.

#include <hdf5.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/hdf5/ids.hpp"
#include "src/hdf5/metadata_driver.hpp"
#include "src/hdf5/metadata_plan.hpp"

namespace muster::hdf5 {
namespace {

// A filter returns 0 to report a failure.
size_t refuse(unsigned, size_t, const unsigned*, size_t, size_t*, void**) {
  return 0;
}

/// Registers filter 32015 with libhdf5, because a dataset with a mandatory filter needs a table entry. The filter never
/// runs, because chunks are already compressed. The destructor unregisters it. Plugins are not searched for in the
/// meantime.
class RegisteredZstd {
 public:
  RegisteredZstd() {
    checked(H5PLget_loading_state(&plugins_), "H5PLget_loading_state");
    checked(H5PLset_loading_state(0), "H5PLset_loading_state");
    if (H5Zfilter_avail(zstd_filter) > 0) return;
    const H5Z_class2_t filter = filter_class(zstd_filter, "zstd", &refuse);
    if (H5Zregister(&filter) < 0) {
      const CallFailed failure("H5Zregister");
      H5PLset_loading_state(plugins_);
      throw failure;
    }
    is_ours_ = true;
  }
  RegisteredZstd& operator=(RegisteredZstd&&) = delete;
  ~RegisteredZstd() {
    if (is_ours_) H5Zunregister(zstd_filter);
    H5PLset_loading_state(plugins_);
  }

 private:
  unsigned plugins_ = 0;
  bool is_ours_ = false;
};

Id copy_of(hid_t type) {
  return {H5Tcopy(type), "H5Tcopy"};
}

/// Makes a float type with an IEEE layout that HDF5 has no name for: sign, exponent, mantissa from the highest bit
/// down.
Id float_type(std::size_t bytes, std::size_t exponent_bits, std::size_t mantissa_bits) {
  Id type = copy_of(H5T_IEEE_F32LE);
  const std::size_t sign_at = exponent_bits + mantissa_bits;
  // The fields are set first: a type can shrink only to the size that they need.
  checked(H5Tset_fields(type.get(), sign_at, mantissa_bits, exponent_bits, 0, mantissa_bits), "H5Tset_fields");
  checked(H5Tset_offset(type.get(), 0), "H5Tset_offset");
  checked(H5Tset_precision(type.get(), 8 * bytes), "H5Tset_precision");
  checked(H5Tset_size(type.get(), bytes), "H5Tset_size");
  checked(H5Tset_ebias(type.get(), (std::size_t{1} << (exponent_bits - 1)) - 1), "H5Tset_ebias");
  return type;
}

Id bool_type() {
  Id type(H5Tenum_create(H5T_STD_I8LE), "H5Tenum_create");
  const std::int8_t no = 0;
  const std::int8_t yes = 1;
  checked(H5Tenum_insert(type.get(), "FALSE", &no), "H5Tenum_insert");
  checked(H5Tenum_insert(type.get(), "TRUE", &yes), "H5Tenum_insert");
  return type;
}

Id complex_type() {
  Id type(H5Tcreate(H5T_COMPOUND, 2 * sizeof(float)), "H5Tcreate");
  checked(H5Tinsert(type.get(), "r", 0, H5T_IEEE_F32LE), "H5Tinsert");
  checked(H5Tinsert(type.get(), "i", sizeof(float), H5T_IEEE_F32LE), "H5Tinsert");
  return type;
}

/// Returns the type in the file, chosen so that every HDF5 tool reads right values or plain bits. Unsigned bytes are
/// used for types that libhdf5 would read wrong (F8_E4M3, F8_E8M0: it has no such floats), and for packed elements, for
/// which it has no type.
Id file_type(DType dtype) {
  switch (dtype) {
    case DType::boolean:
      return bool_type();
    case DType::i8:
      return copy_of(H5T_STD_I8LE);
    case DType::u16:
      return copy_of(H5T_STD_U16LE);
    case DType::i16:
      return copy_of(H5T_STD_I16LE);
    case DType::u32:
      return copy_of(H5T_STD_U32LE);
    case DType::i32:
      return copy_of(H5T_STD_I32LE);
    case DType::u64:
      return copy_of(H5T_STD_U64LE);
    case DType::i64:
      return copy_of(H5T_STD_I64LE);
    case DType::f16:
      return float_type(2, 5, 10);
    case DType::bf16:
      return float_type(2, 8, 7);
    case DType::f32:
      return copy_of(H5T_IEEE_F32LE);
    case DType::f64:
      return copy_of(H5T_IEEE_F64LE);
    case DType::f8_e5m2:
      return float_type(1, 5, 2);
    case DType::complex64:
      return complex_type();
    case DType::u8:
    case DType::f8_e4m3fn:
    case DType::f8_e8m0:
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
    case DType::f6_e2m3:
    case DType::f6_e3m2:
    case DType::f4_e2m1:
    case DType::u4:
    case DType::i4:
      break;
  }
  return copy_of(H5T_STD_U8LE);
}

/// Makes the type of a UTF-8 string of exactly `bytes` bytes.
Id text_type(std::size_t bytes) {
  Id type = copy_of(H5T_C_S1);
  checked(H5Tset_size(type.get(), bytes), "H5Tset_size");
  checked(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), "H5Tset_strpad");
  checked(H5Tset_cset(type.get(), H5T_CSET_UTF8), "H5Tset_cset");
  return type;
}

// Small groups keep their links in their header. With more links, the index for large groups is smaller.
constexpr std::size_t few_links = 8;

// H5F_ACC_TRUNC without its macro, which aborts the program if a different libhdf5 release is loaded.
constexpr unsigned truncate = 0x0002U;

// A limit; memory is allocated as it is used.
constexpr std::size_t cache_bytes = std::size_t{64} << 20;

/// No fill values and no times, so that the same plan gives the same bytes.
Id dataset_list() {
  Id list(H5Pcreate(H5P_DATASET_CREATE), "H5Pcreate");
  checked(H5Pset_fill_time(list.get(), H5D_FILL_TIME_NEVER), "H5Pset_fill_time");
  checked(H5Pset_obj_track_times(list.get(), false), "H5Pset_obj_track_times");
  return list;
}

class Maker {
 public:
  explicit Maker(const MetadataPlan& plan) : plan_(plan), state_{plan.user_block_bytes, plan.metadata_offset} {}

  Metadata make() {
    checked(H5Pset_layout(contiguous_.get(), H5D_CONTIGUOUS), "H5Pset_layout");
    checked(H5Pset_alloc_time(contiguous_.get(), H5D_ALLOC_TIME_EARLY), "H5Pset_alloc_time");
    checked(H5Pset_char_encoding(utf8_link_.get(), H5T_CSET_UTF8), "H5Pset_char_encoding");
    for (const Dataset& dataset : plan_.datasets)
      if (!dataset.chunk_shape.empty() && !zstd_) zstd_.emplace();
    create_file();
    for (const Fact& fact : plan_.facts) put_number(file_.get(), fact.name, fact.value);
    put_config();
    put_catalogue();
    put_weights();
    file_.close("H5Fclose");
    return {std::move(state_.superblock), std::move(state_.structures), {}};
  }

  /// Cleans up after a failure. Returns false if libhdf5 still holds the file, and thereby this object.
  bool give_up() noexcept {
    state_.is_abandoned = true;
    try {
      file_.close("H5Fclose");
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

 private:
  // Structures are in memory anyway, so evicting and reloading them would be wasted work.
  static void keep_all_in_cache(hid_t access) {
    H5AC_cache_config_t cache{};
    cache.version = H5AC__CURR_CACHE_CONFIG_VERSION;
    checked(H5Pget_mdc_config(access, &cache), "H5Pget_mdc_config");
    cache.set_initial_size = true;
    cache.initial_size = cache_bytes;
    cache.max_size = cache_bytes;
    cache.incr_mode = H5C_incr__off;
    cache.flash_incr_mode = H5C_flash_incr__off;
    cache.decr_mode = H5C_decr__off;
    checked(H5Pset_mdc_config(access, &cache), "H5Pset_mdc_config");
  }

  void create_file() {
    const Id creation(H5Pcreate(H5P_FILE_CREATE), "H5Pcreate");
    checked(H5Pset_userblock(creation.get(), plan_.user_block_bytes), "H5Pset_userblock");
    checked(H5Pset_obj_track_times(creation.get(), false), "H5Pset_obj_track_times");
    const Id access(H5Pcreate(H5P_FILE_ACCESS), "H5Pcreate");
    checked(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110), "H5Pset_libver_bounds");
    checked(H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG), "H5Pset_fclose_degree");
    keep_all_in_cache(access.get());
    driver_.use_for(access.get(), state_);
    file_ = Id(H5Fcreate("muster-metadata", truncate, creation.get(), access.get()), "H5Fcreate");
  }

  Id put_dataset(hid_t group, const char* name, hid_t type, hid_t space, std::uint64_t offset, std::uint64_t bytes) {
    state_.next_offset = offset;
    state_.next_bytes = bytes;
    Id dataset(H5Dcreate2(group, name, type, space, utf8_link_.get(), contiguous_.get(), H5P_DEFAULT), "H5Dcreate2");
    if (state_.next_bytes != 0) throw std::runtime_error("libhdf5 allocated no space for the elements of a dataset");
    return dataset;
  }

  void put_config() {
    const Id type = text_type(plan_.config_bytes);
    put_dataset(file_.get(), "config", type.get(), scalar_.get(), plan_.config_offset, plan_.config_bytes);
  }

  void put_catalogue() {
    const hsize_t size = plan_.catalogue_bytes;
    const Id space(H5Screate_simple(1, &size, nullptr), "H5Screate_simple");
    put_dataset(file_.get(), "catalogue", H5T_STD_U8LE, space.get(), plan_.catalogue_offset, plan_.catalogue_bytes);
  }

  void put_weights() {
    const Id creation(H5Pcreate(H5P_GROUP_CREATE), "H5Pcreate");
    checked(H5Pset_obj_track_times(creation.get(), false), "H5Pset_obj_track_times");
    if (plan_.datasets.size() > few_links)
      checked(H5Pset_link_phase_change(creation.get(), 0, 0), "H5Pset_link_phase_change");
    const Id group(H5Gcreate2(file_.get(), "weights", H5P_DEFAULT, creation.get(), H5P_DEFAULT), "H5Gcreate2");
    for (const Dataset& dataset : plan_.datasets) put_weight(group.get(), dataset);
  }

  void put_weight(hid_t group, const Dataset& dataset) {
    const Id& type = type_of(dataset.dtype);
    const Id space = space_of(dataset);
    Id id;
    if (dataset.chunk_shape.empty()) {
      id = put_dataset(group, dataset.link_name.c_str(), type.get(), space.get(), dataset.offset, dataset.bytes);
    } else {
      id = put_chunked(group, dataset, type.get(), space.get());
    }
    put_text(id.get(), "dtype", dataset.dtype_name);
    if (!is_packed_dtype(dataset.dtype)) return;
    put_shape(id.get(), dataset.shape);
    if (is_nibble(dataset.dtype)) put_text(id.get(), "nibble_order", "low_first");
  }

  Id put_chunked(hid_t group, const Dataset& dataset, hid_t type, hid_t space) {
    const Id creation = dataset_list();
    const std::vector<hsize_t> shape(dataset.chunk_shape.begin(), dataset.chunk_shape.end());
    checked(H5Pset_chunk(creation.get(), static_cast<int>(shape.size()), shape.data()), "H5Pset_chunk");
    if (H5Tget_size(type) > 1) checked(H5Pset_shuffle(creation.get()), "H5Pset_shuffle");
    const auto level = static_cast<unsigned>(plan_.zstd_level);
    checked(H5Pset_filter(creation.get(), zstd_filter, H5Z_FLAG_MANDATORY, 1, &level), "H5Pset_filter");
    Id id(H5Dcreate2(group, dataset.link_name.c_str(), type, space, utf8_link_.get(), creation.get(), H5P_DEFAULT),
          "H5Dcreate2");
    std::vector<hsize_t> at(shape.size(), 0);
    for (const Chunk& chunk : dataset.chunks) {
      state_.next_offset = chunk.offset;
      state_.next_bytes = chunk.bytes;
      // The driver ignores the elements, so any address will do.
      checked(H5Dwrite_chunk(id.get(), H5P_DEFAULT, chunk.filter_mask, at.data(), chunk.bytes, &plan_),
              "H5Dwrite_chunk");
      if (state_.next_bytes != 0) throw std::runtime_error("libhdf5 allocated no space for a chunk");
      // Advances to the next chunk in row-major order.
      for (std::size_t dim = shape.size(); dim-- > 0;) {
        at[dim] += shape[dim];
        if (dim == 0 || at[dim] < static_cast<hsize_t>(dataset.shape[dim])) break;
        at[dim] = 0;
      }
    }
    return id;
  }

  static bool is_packed_dtype(DType dtype) noexcept {
    return is_nibble(dtype) || dtype == DType::f6_e2m3 || dtype == DType::f6_e3m2;
  }
  static bool is_nibble(DType dtype) noexcept {
    return dtype == DType::f4_e2m1 || dtype == DType::u4 || dtype == DType::i4;
  }

  Id space_of(const Dataset& dataset) const {
    std::vector<hsize_t> extents(dataset.shape.begin(), dataset.shape.end());
    if (is_packed_dtype(dataset.dtype)) extents = {dataset.bytes};
    if (extents.empty()) return {H5Screate(H5S_SCALAR), "H5Screate"};
    return {H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), "H5Screate_simple"};
  }

  void put_attribute(hid_t object, const char* name, hid_t type, hid_t space, const void* value) const {
    const Id attribute(H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT), "H5Acreate2");
    checked(H5Awrite(attribute.get(), type, value), "H5Awrite");
  }

  void put_text(hid_t object, const char* name, std::string_view text) {
    std::optional<Id>& type = text_types_.at(text.size());
    if (!type) type.emplace(text_type(text.size()));
    put_attribute(object, name, type->get(), scalar_.get(), text.data());
  }

  void put_number(hid_t object, const char* name, std::uint64_t value) const {
    put_attribute(object, name, H5T_STD_U64LE, scalar_.get(), &value);
  }

  void put_shape(hid_t object, std::span<const std::int64_t> shape) const {
    const hsize_t rank = shape.size();
    // A scalar's shape is an empty list.
    const Id space(H5Screate_simple(1, &rank, nullptr), "H5Screate_simple");
    const std::int64_t none = 0;
    put_attribute(object, "shape", H5T_STD_I64LE, space.get(), shape.empty() ? &none : shape.data());
  }

  const Id& type_of(DType dtype) {
    std::optional<Id>& type = types_.at(static_cast<std::size_t>(dtype));
    if (!type) type.emplace(file_type(dtype));
    return *type;
  }

  const MetadataPlan& plan_;
  DriverState state_;
  RegisteredDriver driver_;
  std::optional<RegisteredZstd> zstd_;
  Id contiguous_ = dataset_list();  // for contiguous datasets
  Id utf8_link_{H5Pcreate(H5P_LINK_CREATE), "H5Pcreate"};
  Id scalar_{H5Screate(H5S_SCALAR), "H5Screate"};
  std::array<std::optional<Id>, 256> types_;      // by dtype
  std::array<std::optional<Id>, 64> text_types_;  // by length: names of dtypes and the like
  Id file_;
};

// Compares the version of the headers with that of the loaded library, because libhdf5 aborts the program if it finds a
// difference itself.
void check_version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  if (H5get_libversion(&major, &minor, &release) < 0) throw CallFailed("H5get_libversion");
  if (major == H5_VERS_MAJOR && minor == H5_VERS_MINOR && release >= H5_VERS_RELEASE) return;
  const auto spelled = [](unsigned a, unsigned b, unsigned c) {
    return std::to_string(a) + "." + std::to_string(b) + "." + std::to_string(c);
  };
  throw std::runtime_error("this process has libhdf5 " + spelled(major, minor, release) +
                           " loaded, and libmuster-hdf5 was built for " +
                           spelled(H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE));
}

}  // namespace
}  // namespace muster::hdf5

extern "C" __attribute__((visibility("default"))) bool muster_hdf5_make_metadata(
    const muster::hdf5::MetadataPlan& plan, muster::hdf5::Metadata& result) noexcept {
  using namespace muster::hdf5;
  try {
    check_version();
    const QuietErrors quiet;
    auto maker = std::make_unique<Maker>(plan);
    try {
      result = maker->make();
    } catch (const std::exception&) {
      if (!maker->give_up()) static_cast<void>(maker.release());
      throw;
    }
    return true;
  } catch (const std::exception& failure) {
    result.failure = failure.what();
    return false;
  }
}
