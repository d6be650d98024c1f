// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/hdf5/listing.hpp"

#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <array>
#include <cerrno>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <utility>

#include "src/hdf5/ids.hpp"

// The function that H5Zregister calls. H5Zregister itself refuses filters that are part of libhdf5.
extern "C" herr_t H5Z_register(const H5Z_class2_t* filter) __attribute__((weak));

namespace muster::hdf5 {
namespace {

/// Whether libhdf5's own deflate decoder is replaced by one that checks the length of a chunk.
bool undoes_deflate = false;
constexpr std::size_t checksum_bytes = 4;

/// The decompressed size of a chunk of the dataset that is being read. libhdf5 does not check it: it would read memory
/// beyond a shorter chunk as elements.
std::size_t decoded_bytes = 0;

/// Decodes a chunk into at most `most` bytes and returns their number. Returns another number than `most` if the chunk
/// is damaged or larger.
using Decode = std::size_t (*)(std::byte* target, std::size_t most, const void* from, std::size_t bytes);

std::size_t decode_zstd(std::byte* target, std::size_t most, const void* from, std::size_t bytes) {
  return ::ZSTD_decompress(target, most, from, bytes);
}

std::size_t decode_deflate(std::byte* target, std::size_t most, const void* from, std::size_t bytes) {
  uLongf made = most;
  const int result = ::uncompress(reinterpret_cast<Bytef*>(target), &made, static_cast<const Bytef*>(from), bytes);
  return result == Z_OK ? made : most + 1;
}

template <Decode decode>
size_t undo(unsigned flags, size_t, const unsigned*, size_t bytes, size_t* room, void** buffer) {
  if ((flags & H5Z_FLAG_REVERSE) == 0) return 0;
  void* decoded = H5allocate_memory(decoded_bytes, false);
  if (decoded == nullptr) return 0;
  if (decode(static_cast<std::byte*>(decoded), decoded_bytes, *buffer, bytes) != decoded_bytes) {
    H5free_memory(decoded);
    return 0;
  }
  H5free_memory(*buffer);
  *buffer = decoded;
  *room = decoded_bytes;
  return decoded_bytes;
}

class ElementsReader {
 public:
  explicit ElementsReader(hid_t file) : file_(file) {}

  /// Returns the requested elements. Throws Refusal.
  std::vector<std::byte> read(const ElementsQuestion& question) {
    if (question.address != address_ || !dataset_) open(question.address);
    if (question.item_bytes != item_bytes_ || question.count > most_question_bytes / item_bytes_ ||
        question.first > elements_ || question.count > elements_ - question.first)
      throw ElementRefusal{"the file has changed since it was listed"};
    // Zeros, because elements that were never written may have no fill value.
    std::vector<std::byte> elements(question.count * item_bytes_);
    // A run of elements is read as a few boxes, one after the other: each is the largest one that starts at `at` and
    // does not pass the end.
    std::uint64_t at = question.first;
    const std::uint64_t end = question.first + question.count;
    while (at != end) {
      std::size_t dim = 0;
      while (dim + 1 < extents_.size() && (at % inner_[dim] != 0 || end - at < inner_[dim])) ++dim;
      at += box(at, dim, end - at, elements.data() + (at - question.first) * item_bytes_);
    }
    return elements;
  }

  struct ElementRefusal {
    std::string words;
  };

 private:
  void open(std::uint64_t address) {
    dataset_ = Id(H5Oopen_by_addr(file_, address));
    address_ = address;
    const Id type(dataset_ ? H5Dget_type(dataset_.get()) : hid_t{-1});
    memory_type_ = Id(type ? H5Tcopy(type.get()) : hid_t{-1});
    space_ = Id(memory_type_ ? H5Dget_space(dataset_.get()) : hid_t{-1});
    const int rank = space_ ? H5Sget_simple_extent_ndims(space_.get()) : -1;
    if (rank < 0 || rank > most_rank) throw_last();
    const ElementType element = element_type(memory_type_.get());
    if (!element.dtype || (element.is_big_endian && H5Tset_order(memory_type_.get(), H5T_ORDER_LE) < 0)) throw_last();
    item_bytes_ = element.bytes;
    extents_.assign(static_cast<std::size_t>(rank), 0);
    if (rank != 0 && H5Sget_simple_extent_dims(space_.get(), extents_.data(), nullptr) < 0) throw_last();
    inner_.assign(extents_.size(), 1);
    elements_ = 1;
    for (std::size_t dim = extents_.size(); dim-- > 0;) {
      inner_[dim] = elements_;
      if (__builtin_mul_overflow(elements_, extents_[dim], &elements_)) refuse("its shape overflows");
    }
    const Id properties(H5Dget_create_plist(dataset_.get()));
    std::array<hsize_t, most_rank> chunk{};
    const int chunk_rank = properties && H5Pget_layout(properties.get()) == H5D_CHUNKED
                               ? H5Pget_chunk(properties.get(), most_rank, chunk.data())
                               : 0;
    std::uint64_t chunk_bytes = item_bytes_;
    for (int dim = 0; dim < chunk_rank; ++dim)
      if (__builtin_mul_overflow(chunk_bytes, chunk[static_cast<std::size_t>(dim)], &chunk_bytes)) chunk_bytes = 0;
    if (chunk_bytes == 0 || chunk_bytes > most_chunk_bytes) refuse("its chunks have changed since the file was listed");
    chunk_.assign(chunk.begin(), chunk.begin() + std::max(chunk_rank, 0));
    decoded_bytes = chunk_bytes;
    stored_bytes_ = 0;
    const int filters = chunk_rank > 0 ? H5Pget_nfilters(properties.get()) : 0;
    for (int i = 0; i < filters; ++i) {
      unsigned flags = 0;
      std::size_t parameters = 0;
      const H5Z_filter_t filter =
          H5Pget_filter2(properties.get(), static_cast<unsigned>(i), &flags, &parameters, nullptr, 0, nullptr, nullptr);
      if (filter == H5Z_FILTER_DEFLATE || filter == zstd_filter) {
        if (filter == H5Z_FILTER_DEFLATE && !undoes_deflate) refuse("this libhdf5 cannot report the length of chunks");
        // Filters before it in the pipeline change the length of its input. Its own result shows whether the chunk is
        // complete.
        chunk_.clear();
        return;
      }
      if (filter == H5Z_FILTER_FLETCHER32) decoded_bytes += checksum_bytes;
    }
    if (filters > 0) stored_bytes_ = decoded_bytes;
  }

  /// Checks that chunks stored without compression, with their checksums, have the expected length. libhdf5 does not
  /// check it.
  void check_chunks(std::span<const hsize_t> begin, std::span<const hsize_t> size) {
    if (stored_bytes_ == 0) return;
    std::vector<hsize_t> at(begin.size());
    for (std::size_t i = 0; i < at.size(); ++i) at[i] = begin[i] / chunk_[i] * chunk_[i];
    for (;;) {
      hsize_t stored = 0;
      if (H5Dget_chunk_storage_size(dataset_.get(), at.data(), &stored) < 0) throw_last();
      // 0: never written.
      if (stored != 0 && stored != stored_bytes_) refuse("the length of a chunk is not the expected one");
      std::size_t dim = at.size();
      while (dim-- > 0) {
        at[dim] += chunk_[dim];
        if (at[dim] < begin[dim] + size[dim]) break;
        at[dim] = begin[dim] / chunk_[dim] * chunk_[dim];
      }
      if (dim == static_cast<std::size_t>(-1)) return;
    }
  }

  /// Reads up to `most` elements from `at` on, in whole steps of one dimension. Returns their number.
  std::uint64_t box(std::uint64_t at, std::size_t dim, std::uint64_t most, std::byte* target) {
    std::vector<hsize_t> begin(extents_.size());
    std::vector<hsize_t> size(extents_.size(), 1);
    for (std::size_t i = 0; i < extents_.size(); ++i) {
      begin[i] = at / inner_[i] % extents_[i];
      if (i == dim) size[i] = std::min(most / inner_[i], extents_[i] - begin[i]);
      if (i > dim) size[i] = extents_[i];
    }
    // The memory space has the box's own shape: for any other shape libhdf5 would iterate element by element.
    const Id memory(extents_.empty() ? H5Screate(H5S_SCALAR)
                                     : H5Screate_simple(static_cast<int>(size.size()), size.data(), nullptr));
    check_chunks(begin, size);
    if (!memory || (!extents_.empty() &&
                    H5Sselect_hyperslab(space_.get(), H5S_SELECT_SET, begin.data(), nullptr, size.data(), nullptr) < 0))
      throw_last();
    if (H5Dread(dataset_.get(), memory_type_.get(), memory.get(), space_.get(), H5P_DEFAULT, target) < 0) throw_last();
    return extents_.empty() ? 1 : size[dim] * inner_[dim];
  }

  [[noreturn]] void refuse(std::string words) {
    dataset_ = Id();
    throw ElementRefusal{std::move(words)};
  }
  [[noreturn]] void throw_last() { refuse("libhdf5 cannot read it: " + last_failure()); }

  hid_t file_;
  std::uint64_t address_ = HADDR_UNDEF;
  Id dataset_;  ///< stays open to keep the chunks that were decoded last
  Id memory_type_;
  Id space_;
  std::uint64_t item_bytes_ = 1;
  std::uint64_t elements_ = 0;
  std::vector<hsize_t> extents_;
  std::vector<hsize_t> inner_;      ///< elements of one step of each dimension
  std::vector<hsize_t> chunk_;      ///< shape of a chunk, if its stored length is known
  std::uint64_t stored_bytes_ = 0;  ///< that length; 0: it is not
};

bool read_question(int socket, ElementsQuestion& question) {
  std::size_t done = 0;
  while (done < sizeof question) {
    const ssize_t got = ::read(socket, reinterpret_cast<std::byte*>(&question) + done, sizeof question - done);
    if (got <= 0 && !(got < 0 && errno == EINTR)) return false;
    done += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  return true;
}

struct FloatFormat {
  DType dtype;
  std::size_t bytes;
  std::size_t exponent_bits;
  std::size_t mantissa_bits;
  std::size_t bias;
};
constexpr std::array<FloatFormat, 6> float_formats = {{
    {DType::f16, 2, 5, 10, 15},
    {DType::bf16, 2, 8, 7, 127},
    {DType::f32, 4, 8, 23, 127},
    {DType::f64, 8, 11, 52, 1023},
    {DType::f8_e5m2, 1, 5, 2, 15},
    {DType::f8_e4m3fn, 1, 4, 3, 7},
}};

ElementType refused(std::string words) {
  return {.refusal = std::move(words)};
}

bool set_order(hid_t type, ElementType& element) {
  if (element.bytes == 1) return true;
  const H5T_order_t order = H5Tget_order(type);
  element.is_big_endian = order == H5T_ORDER_BE;
  return order == H5T_ORDER_LE || order == H5T_ORDER_BE;
}

ElementType integer(hid_t type, std::size_t bytes) {
  constexpr std::array<std::array<DType, 2>, 4> dtypes = {
      {{DType::u8, DType::i8}, {DType::u16, DType::i16}, {DType::u32, DType::i32}, {DType::u64, DType::i64}}};
  const std::size_t bits = H5Tget_precision(type);
  if (bits != bytes * 8 || H5Tget_offset(type) != 0 || (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8))
    return refused("integers of " + std::to_string(bits) + " bits in " + std::to_string(bytes) + " bytes");
  const std::size_t row = bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3;
  ElementType element{.dtype = dtypes[row][H5Tget_sign(type) == H5T_SGN_NONE ? 0 : 1], .bytes = bytes};
  return set_order(type, element) ? element : refused("integers of an odd byte order");
}

ElementType floating(hid_t type, std::size_t bytes) {
  std::size_t sign_at = 0;
  std::size_t exponent_at = 0;
  std::size_t exponent_bits = 0;
  std::size_t mantissa_at = 0;
  std::size_t mantissa_bits = 0;
  if (H5Tget_fields(type, &sign_at, &exponent_at, &exponent_bits, &mantissa_at, &mantissa_bits) < 0)
    return refused("floats whose fields are damaged");
  for (const FloatFormat& format : float_formats) {
    if (format.bytes != bytes || format.exponent_bits != exponent_bits || format.mantissa_bits != mantissa_bits)
      continue;
    if (mantissa_at != 0 || exponent_at != mantissa_bits || sign_at != bytes * 8 - 1 ||
        H5Tget_ebias(type) != format.bias || H5Tget_precision(type) != bytes * 8 || H5Tget_offset(type) != 0 ||
        H5Tget_norm(type) != H5T_NORM_IMPLIED)
      continue;
    ElementType element{.dtype = format.dtype, .bytes = bytes};
    return set_order(type, element) ? element : refused("floats of an odd byte order");
  }
  return refused("floats of " + std::to_string(exponent_bits) + " exponent and " + std::to_string(mantissa_bits) +
                 " mantissa bits in " + std::to_string(bytes) + " bytes");
}

std::string member_name(hid_t type, unsigned member) {
  const std::unique_ptr<char, herr_t (*)(void*)> name(H5Tget_member_name(type, member), H5free_memory);
  return name ? name.get() : std::string();
}

ElementType enumeration(hid_t type, std::size_t bytes) {
  const int members = H5Tget_nmembers(type);
  const std::string words = "an enumeration of " + std::to_string(members) + " names";
  if (bytes != 1 || members != 2) return refused(words);
  for (unsigned member = 0; member < 2; ++member) {
    unsigned char value = 0;
    if (H5Tget_member_value(type, member, &value) < 0 || value > 1) return refused(words);
    if (member_name(type, member) != (value == 0 ? "FALSE" : "TRUE")) return refused(words);
  }
  return {.dtype = DType::boolean, .bytes = 1};
}

ElementType compound(hid_t type, std::size_t bytes) {
  const int members = H5Tget_nmembers(type);
  std::string words = "a compound of " + std::to_string(members) + (members == 1 ? " member" : " members");
  if (members != 2) return refused(words);
  constexpr std::array<std::string_view, 2> names = {"r", "i"};
  std::array<ElementType, 2> parts;
  for (unsigned member = 0; member < 2; ++member) {
    if (member_name(type, member) != names[member]) return refused(words);
    const Id part(H5Tget_member_type(type, member));
    if (!part || H5Tget_class(part.get()) != H5T_FLOAT) return refused(words);
    parts[member] = floating(part.get(), H5Tget_size(part.get()));
    if (H5Tget_member_offset(type, member) != member * parts[0].bytes) return refused(words);
  }
  if (parts[0].dtype != DType::f32 || parts[1].dtype != DType::f32 || bytes != 8 ||
      parts[0].is_big_endian != parts[1].is_big_endian)
    return refused("complex numbers of two other floats than F32");
  return {.dtype = DType::complex64, .is_big_endian = parts[0].is_big_endian, .bytes = bytes};
}

}  // namespace

void register_decoders() {
  const H5Z_class2_t zstd = filter_class(zstd_filter, "zstd", &undo<decode_zstd>);
  H5Zregister(&zstd);
  const H5Z_class2_t deflate = filter_class(H5Z_FILTER_DEFLATE, "deflate", &undo<decode_deflate>);
  undoes_deflate = H5Z_register != nullptr && H5open() >= 0 && H5Z_register(&deflate) >= 0;
}

void keep_chunks(hid_t access) {
  constexpr std::size_t slots = 12'421;
  constexpr std::size_t bytes = std::size_t{16} << 20;
  constexpr double read_ones_first = 0.75;
  H5Pset_cache(access, 0, slots, bytes, read_ones_first);
}

void answer_questions(hid_t file, const std::string& refusal, int socket) {
  ElementsReader reader(file);
  ElementsQuestion question;
  while (read_question(socket, question)) {
    std::vector<std::byte> elements;
    std::string words = refusal;
    try {
      if (words.empty()) elements = reader.read(question);
    } catch (const ElementsReader::ElementRefusal& caught) {
      words = caught.words;
    } catch (const std::bad_alloc&) {
      words = "it needs more memory than the limit of muster-hdf5-reader";
    }
    words.resize(std::min<std::size_t>(words.size(), longest_words));
    const std::uint64_t length = words.size();
    if (!write_all(socket, std::as_bytes(std::span(&length, 1))) ||
        !write_all(socket, std::as_bytes(std::span(words))) || !write_all(socket, elements))
      return;
  }
}

ElementType element_type(hid_t type) {
  const std::size_t bytes = H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return integer(type, bytes);
    case H5T_FLOAT:
      return floating(type, bytes);
    case H5T_ENUM:
      return enumeration(type, bytes);
    case H5T_COMPOUND:
      return compound(type, bytes);
    case H5T_STRING:
      return {.bytes = bytes, .is_text = true};
    case H5T_VLEN:
      return refused("lists of variable length");
    case H5T_REFERENCE:
      return refused("references");
    case H5T_OPAQUE:
      return refused("opaque bytes");
    case H5T_BITFIELD:
      return refused("bit fields");
    case H5T_TIME:
      return refused("times");
    case H5T_ARRAY:
      return refused("arrays as elements");
    default:
      return refused("an unknown type");
  }
}

}  // namespace muster::hdf5
