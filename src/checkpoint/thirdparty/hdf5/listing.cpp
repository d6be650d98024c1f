// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/hdf5/listing.hpp"

#include <array>
#include <cstring>
#include <exception>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "src/hdf5/ids.hpp"

namespace muster::hdf5 {
namespace {

// No tensor is larger than a file can be.
constexpr std::uint64_t most_bytes = std::uint64_t{1} << 62;
constexpr std::uint64_t most_chunks = std::uint64_t{1} << 20;  // of a file, including chunks that are not stored
constexpr std::size_t longest_target = 4096;
constexpr std::size_t most_to_read = 50'000;
constexpr int most_filters = 8;

// From HDF5's registry: filters that are common in files of weights and measurements.
constexpr std::array<std::pair<H5Z_filter_t, std::string_view>, 14> known_filters = {{
    {4, "szip"},
    {5, "n-bit"},
    {6, "scale-offset"},
    {305, "lzo"},
    {307, "bzip2"},
    {32000, "lzf"},
    {32001, "blosc"},
    {32004, "lz4"},
    {32008, "bitshuffle"},
    {32013, "zfp"},
    {32017, "sz"},
    {32023, "sz3"},
    {32026, "blosc2"},
    {32028, "sperr"},
}};

/// Returns "lzf (32000)", or "the filter 4711" if the filter has no known name.
std::string filter_name(H5Z_filter_t id, std::string_view name_in_file) {
  for (const auto& [known, name] : known_filters)
    if (known == id) return std::string(name) + " (" + std::to_string(id) + ")";
  std::string words = "the filter " + std::to_string(id);
  if (!name_in_file.empty()) words.append(" \"").append(name_in_file).append("\"");
  return words;
}

/// Returns a * b; nullopt if that is more than a tensor can have.
std::optional<std::uint64_t> product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result) || result > most_bytes) return std::nullopt;
  return result;
}

std::string under(const std::string& parent, const char* name) {
  return parent.empty() ? std::string(name) : parent + "/" + name;
}

std::string quoted(std::string_view words) {
  return "\"" + std::string(words) + "\"";
}

std::string damaged_dataset(const std::string& why) {
  return refusal_words("a corrupted dataset: ", why);
}

std::string cannot_open() {
  return refusal_words("corrupted, libhdf5 cannot open it: ", last_failure());
}

class FileListing {
 public:
  FileListing(hid_t file, std::uint64_t file_bytes, ReportWriter& report)
      : file_(file), file_bytes_(file_bytes), report_(report) {}

  std::vector<ObjectToRead> run() {
    const Id root(H5Oopen(file_, "/", H5P_DEFAULT));
    if (!root) {
      report_.loss("", cannot_open());
      return {};
    }
    object(root.get(), "", 0);
    return std::move(to_read_);
  }

 private:
  /// The context of a visit of a group's links. Exceptions must not unwind through libhdf5, so they are stored here.
  struct LinkVisit {
    FileListing* listing;
    const std::string* path;
    int depth;
    std::exception_ptr failure;
  };

  static herr_t visit_link(hid_t group, const char* name, const H5L_info_t* info, void* data) {
    auto& here = *static_cast<LinkVisit*>(data);
    try {
      here.listing->link(group, name, *info, *here.path, here.depth);
      return here.listing->is_full_ ? 1 : 0;
    } catch (...) {
      here.failure = std::current_exception();
      return 1;
    }
  }

  void link(hid_t group, const char* name, const H5L_info_t& info, const std::string& parent, int depth) {
    if (++objects_ > most_objects) {
      report_.loss("", "more than " + std::to_string(most_objects) + " names: the remaining ones are not listed");
      is_full_ = true;
      return;
    }
    if (parent.size() + std::strlen(name) + 1 > most_path_bytes) {
      report_.loss(parent, "a name of " + std::to_string(std::strlen(name)) + " bytes makes a path of more than " +
                               std::to_string(most_path_bytes) + ": not followed");
      return;
    }
    const std::string path = under(parent, name);
    if (info.type != H5L_TYPE_HARD) {
      unfollowed(group, name, info, path);
      return;
    }
    const Id target(H5Oopen(group, name, H5P_DEFAULT));
    if (!target) {
      report_.loss(path, cannot_open());
      return;
    }
    object(target.get(), path, depth);
  }

  void unfollowed(hid_t group, const char* name, const H5L_info_t& info, const std::string& path) {
    std::vector<char> value;
    if (info.type != H5L_TYPE_HARD && info.u.val_size != 0 && info.u.val_size <= longest_target) {
      value.resize(info.u.val_size + 1);
      if (H5Lget_val(group, name, value.data(), info.u.val_size, H5P_DEFAULT) < 0) value.clear();
    }
    if (info.type == H5L_TYPE_SOFT) {
      report_.issue(path, "a soft link" + (value.empty() ? "" : " to " + quoted(value.data())) + ": not followed");
      return;
    }
    if (info.type != H5L_TYPE_EXTERNAL) {
      report_.loss(path, "a link of the private kind " + std::to_string(info.type) + ": not followed");
      return;
    }
    std::string target;
    unsigned flags = 0;
    const char* file = nullptr;
    const char* object = nullptr;
    if (!value.empty() && H5Lunpack_elink_val(value.data(), info.u.val_size, &flags, &file, &object) >= 0)
      target = ", " + quoted(std::string(file) + " : " + object);
    report_.loss(path, "a link to another file" + target + ": not followed");
  }

  void object(hid_t id, const std::string& path, int depth) {
    H5O_info_t info{};
    if (H5Oget_info2(id, &info, H5O_INFO_BASIC | H5O_INFO_NUM_ATTRS) < 0) {
      report_.loss(path, cannot_open());
      return;
    }
    const auto [known, is_new] = seen_.emplace(info.addr, path);
    if (!is_new) {
      const bool is_group = info.type == H5O_TYPE_GROUP;
      const std::string& first = known->second;
      report_.issue(path, std::string("another name of ") + (is_group ? "the group" : "the dataset") +
                              (first.empty() ? " at the root" : " " + quoted(first)) + ": listed once" +
                              (is_group ? ", because the links form a circle" : ""));
      return;
    }
    ObjectToRead more{.address = info.addr, .path = path, .has_attributes = info.num_attrs != 0};
    if (info.type == H5O_TYPE_GROUP) {
      if (depth >= most_depth) {
        report_.loss(path, "a group that is more than " + std::to_string(most_depth) + " groups deep: not listed");
        return;
      }
      group(id, path, depth);
    } else if (info.type == H5O_TYPE_DATASET) {
      if (const std::string wrong = dataset(id, more); !wrong.empty()) report_.loss(path, wrong);
    } else if (info.type == H5O_TYPE_NAMED_DATATYPE) {
      report_.issue(path, "a named datatype: it has no elements");
    } else {
      report_.loss(path, "an object of the unknown kind " + std::to_string(info.type));
    }
    if (!more.has_attributes && !more.is_text) return;
    if (to_read_.size() < most_to_read)
      to_read_.push_back(std::move(more));
    else if (!std::exchange(has_too_many_texts_, true))
      report_.issue("", "more than " + std::to_string(most_to_read) +
                            " objects have attributes or text: those of the remaining objects are not shown");
  }

  void group(hid_t id, const std::string& path, int depth) {
    LinkVisit here{this, &path, depth + 1, nullptr};
    hsize_t at = 0;
    const herr_t result = H5Literate(id, H5_INDEX_NAME, H5_ITER_NATIVE, &at, &visit_link, &here);
    if (here.failure) std::rethrow_exception(here.failure);
    if (result < 0) report_.loss(path, "a corrupted group, libhdf5 cannot list all of it: " + last_failure());
  }

  /// Returns the reason why a dataset cannot be listed; empty if it is a tensor or text.
  std::string dataset(hid_t id, ObjectToRead& more) {
    const auto damaged = [] { return damaged_dataset(last_failure()); };
    const Id properties(H5Dget_create_plist(id));
    if (!properties) return damaged();
    const H5D_layout_t layout = H5Pget_layout(properties.get());
    if (layout == H5D_VIRTUAL)
      return "a virtual dataset: its elements are in other files or datasets, which are not opened";
    if (layout != H5D_COMPACT && layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED)
      return "its elements have the unknown layout " + std::to_string(layout);
    const int external = H5Pget_external_count(properties.get());
    if (external < 0) return damaged();
    if (external == 1) return "its elements are in another file, which is not opened";
    if (external != 0) return "its elements are in " + std::to_string(external) + " other files, which are not opened";

    const Id type(H5Dget_type(id));
    if (!type) return damaged();
    const ElementType element = element_type(type.get());
    more.is_text = element.is_text;
    if (element.is_text) return {};
    if (!element.dtype) return "not a tensor: its elements are " + element.refusal;

    const Id space(H5Dget_space(id));
    if (!space) return damaged();
    const H5S_class_t kind = H5Sget_simple_extent_type(space.get());
    if (kind == H5S_NULL) return "not a tensor: it has no shape and no elements";
    const int rank = H5Sget_simple_extent_ndims(space.get());
    if (kind == H5S_NO_CLASS || rank < 0 || rank > most_rank) return damaged();
    std::vector<hsize_t> extents(static_cast<std::size_t>(rank));
    if (rank != 0 && H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr) < 0) return damaged();
    std::optional<std::uint64_t> claimed = element.bytes;
    // All extents are checked even if one is 0, because other code multiplies shapes, too.
    for (const hsize_t extent : extents)
      claimed = claimed ? product(*claimed, std::max<hsize_t>(extent, 1)) : std::nullopt;
    if (!claimed) return "not a tensor: it claims more elements than a file can have";
    const std::uint64_t bytes = std::find(extents.begin(), extents.end(), hsize_t{0}) == extents.end() ? *claimed : 0;
    if (layout == H5D_CHUNKED) {
      if (std::string wrong = chunks(properties.get(), extents, element.bytes); !wrong.empty()) return wrong;
    }

    // An empty dataset may have unused storage; a dataset that was never written has none.
    const std::uint64_t stored = bytes == 0 ? 0 : H5Dget_storage_size(id);
    const haddr_t offset = layout == H5D_CONTIGUOUS && stored != 0 ? H5Dget_offset(id) : HADDR_UNDEF;
    H5Eclear2(H5E_DEFAULT);
    // libhdf5 does not check this, and would read beyond its own header.
    if ((layout == H5D_COMPACT || (layout == H5D_CONTIGUOUS && stored != 0)) && stored != bytes)
      return damaged_dataset("the size of its storage contradicts its shape");
    if (layout == H5D_CONTIGUOUS && stored != 0 && offset == HADDR_UNDEF)
      return damaged_dataset("its storage is missing");

    RecordBytes record(ForeignRecord::tensor);
    record.text(more.path).number(static_cast<std::uint64_t>(*element.dtype)).number(extents.size());
    for (const hsize_t extent : extents) record.number(extent);
    record.number(more.address).number(stored);
    record.number(offset == HADDR_UNDEF || element.is_big_endian ? 0 : offset);
    report_.record(record);
    more.tensor = tensors_++;
    return {};
  }

  std::string chunks(hid_t properties, const std::vector<hsize_t>& extents, std::uint64_t item_bytes) {
    std::array<hsize_t, most_rank> chunk{};
    const int rank = H5Pget_chunk(properties, most_rank, chunk.data());
    if (rank <= 0 || static_cast<std::size_t>(rank) != extents.size())
      return damaged_dataset("the dimensions of its chunks differ from its own");
    std::optional<std::uint64_t> bytes = item_bytes;
    std::uint64_t places = 1;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      bytes = bytes && chunk[i] != 0 ? product(*bytes, chunk[i]) : std::nullopt;
      if (!bytes) return "the size of its chunks overflows";
      const std::uint64_t here = extents[i] / chunk[i] + (extents[i] % chunk[i] != 0 ? 1 : 0);
      if (__builtin_mul_overflow(places, here, &places)) places = std::numeric_limits<std::uint64_t>::max();
    }
    if (*bytes > most_chunk_bytes)
      return "its chunks have " + std::to_string(*bytes) + " bytes, and the limit is " +
             std::to_string(most_chunk_bytes);
    if (*bytes > largest_chunk(file_bytes_))
      return "its chunks have " + std::to_string(*bytes) + " bytes, more than " + std::to_string(most_chunk_expansion) +
             " times the " + std::to_string(file_bytes_) + " of the file: refused";

    const int filters = H5Pget_nfilters(properties);
    if (filters < 0 || filters > most_filters) return damaged_dataset("it has too many filters");
    int compressions = 0;
    for (int i = 0; i < filters; ++i) {
      std::array<char, 64> name{};
      std::size_t no_parameters = 0;
      unsigned flags = 0;
      unsigned configuration = 0;
      const H5Z_filter_t filter = H5Pget_filter2(properties, static_cast<unsigned>(i), &flags, &no_parameters, nullptr,
                                                 name.size() - 1, name.data(), &configuration);
      if (filter < 0) return damaged_dataset(last_failure());
      if (filter == H5Z_FILTER_DEFLATE || filter == zstd_filter)
        ++compressions;
      else if (filter != H5Z_FILTER_SHUFFLE && filter != H5Z_FILTER_FLETCHER32)
        return "compressed with " + filter_name(filter, name.data()) +
               ", which Muster cannot decompress. Run h5repack -f GZIP=1 to convert it";
    }
    if (compressions > 1) return "compressed more than once";

    // Some chunk indices have an entry for every chunk, written or not.
    if (places > most_chunks - chunks_)
      return "it is in " + std::to_string(places) + " chunks, and the limit per file is " + std::to_string(most_chunks);
    chunks_ += places;
    return {};
  }

  hid_t file_;
  std::uint64_t file_bytes_;
  ReportWriter& report_;
  std::uint64_t objects_ = 0;
  std::uint64_t chunks_ = 0;
  std::int64_t tensors_ = 0;
  bool is_full_ = false;
  bool has_too_many_texts_ = false;
  std::unordered_map<haddr_t, std::string> seen_;
  std::vector<ObjectToRead> to_read_;
};

}  // namespace

std::vector<ObjectToRead> report_objects(hid_t file, std::uint64_t file_bytes, ReportWriter& report) {
  return FileListing(file, file_bytes, report).run();
}

}  // namespace muster::hdf5
