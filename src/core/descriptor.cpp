// SPDX-License-Identifier: Apache-2.0
// The format, version 1:
//
//  1. A byte 0x4d, and a byte with the version.
//  2. One value: a tag byte, then the data of that tag. Integers are LEB128 varints (signed ones zigzag); reals are 8
//     bytes, little-endian.
//  3. A string: length, then bytes, which are UTF-8. An array: count, then values. An object: count, then key and value
//     of each member, with unique keys.
//  4. A tensor: the number of its kind (dtype and shape), counted in the order of first use. If the number is one past
//     the last known kind, a new kind follows: dtype byte, number of dimensions, extents. So each kind is described
//     once. A tensor in an arena ends with the number of the arena and the offset in it.
//  5. Nothing follows the value.

#include "src/core/descriptor.hpp"

#include <cstring>
#include <string>

#include <fmt/format.h>
#include "muster/error.hpp"

#include "src/base/escaped.hpp"

namespace muster::core {
namespace {

constexpr std::byte magic{0x4d};
constexpr std::byte version{1};

enum class ValueTag : std::uint8_t {
  null,
  no,
  yes,
  integer,
  unsigned_integer,
  real,
  string,
  array,
  object,
  slot_tensor,
  arena_tensor
};

constexpr std::size_t most_dimensions = 64;

class Encoder {
 public:
  explicit Encoder(const std::function<std::optional<TensorLocation>(const Tensor&)>& place) : place_(place) {
    bytes_ = {magic, version};
  }

  void value(const Config& config, int depth) {
    detail::check_config_depth(depth);
    switch (config.type()) {
      case Config::Type::null:
        return tag(ValueTag::null);
      case Config::Type::boolean:
        return tag(config.as_bool() ? ValueTag::yes : ValueTag::no);
      case Config::Type::integer: {
        tag(ValueTag::integer);
        const std::int64_t number = config.as_int();
        return varint((static_cast<std::uint64_t>(number) << 1) ^ static_cast<std::uint64_t>(number >> 63));
      }
      case Config::Type::unsigned_integer:
        tag(ValueTag::unsigned_integer);
        return varint(config.as_uint());
      case Config::Type::real: {
        tag(ValueTag::real);
        const double number = config.as_double();
        return raw(&number, sizeof number);
      }
      case Config::Type::string:
        tag(ValueTag::string);
        return text(config.as_string());
      case Config::Type::array:
        tag(ValueTag::array);
        varint(config.size());
        for (const Config& item : config.as_array()) value(item, depth + 1);
        return;
      case Config::Type::object:
        tag(ValueTag::object);
        varint(config.size());
        for (const auto& [key, member] : config.as_object()) {
          text(key);
          value(member, depth + 1);
        }
        return;
      case Config::Type::tensor:
        return tensor(config.as_tensor());
    }
  }

  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void tag(ValueTag tag) { bytes_.push_back(static_cast<std::byte>(tag)); }
  void varint(std::uint64_t number) {
    for (; number >= 0x80; number >>= 7) bytes_.push_back(static_cast<std::byte>(number | 0x80));
    bytes_.push_back(static_cast<std::byte>(number));
  }
  void raw(const void* data, std::size_t length) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + length);
  }
  void text(const std::string& string) {
    if (!is_utf8(string)) throw Error(ErrorKind::invalid_argument, "config: a key or string is not valid UTF-8");
    varint(string.size());
    raw(string.data(), string.size());
  }

  void tensor(const Tensor& tensor) {
    const std::optional<TensorLocation> place = place_(tensor);
    tag(place ? ValueTag::arena_tensor : ValueTag::slot_tensor);
    kind(tensor.dtype(), tensor.shape());
    if (!place) return;
    varint(place->segment);
    varint(place->offset);
  }

  void kind(DType dtype, const Shape& shape) {
    // Layers have few kinds, and neighbouring tensors often have the same kind, so the search starts at the newest
    // kind.
    for (std::size_t back = 0; back < kinds_.size() && back < 64; ++back) {
      const std::size_t at = kinds_.size() - 1 - back;
      if (kinds_[at].first == dtype && *kinds_[at].second == shape) return varint(at);
    }
    if (shape.size() > most_dimensions)
      throw Error(ErrorKind::invalid_argument,
                  "config: a tensor has more than " + std::to_string(most_dimensions) + " dimensions");
    varint(kinds_.size());
    kinds_.emplace_back(dtype, &shape);
    bytes_.push_back(static_cast<std::byte>(dtype));
    varint(shape.size());
    for (const std::int64_t extent : shape) varint(static_cast<std::uint64_t>(extent));
  }

  const std::function<std::optional<TensorLocation>(const Tensor&)>& place_;
  std::vector<std::byte> bytes_;
  std::vector<std::pair<DType, const Shape*>> kinds_;  // shapes of the caller's tree
};

class DescriptorDecoder {
 public:
  DescriptorDecoder(std::span<const std::byte> bytes,
                    const std::function<Tensor(DType, const Shape&, std::uint64_t, TensorLocation)>& make)
      : bytes_(bytes), make_(make) {}

  Config whole() {
    if (byte() != magic) defect("it does not begin with the magic number");
    if (const std::byte found = byte(); found != version)
      throw Error(ErrorKind::version, fmt::format("malformed config descriptor: format version {}, but this Muster "
                                                  "reads {}. Use one version of Muster on all ranks",
                                                  std::to_integer<int>(found), std::to_integer<int>(version)));
    Config config = value(0);
    if (!bytes_.empty()) defect("there are bytes behind its end");
    return config;
  }

 private:
  [[noreturn]] static void defect(const char* what) {
    throw Error(ErrorKind::corrupt, std::string("malformed config descriptor: ") + what);
  }

  std::byte byte() {
    if (bytes_.empty()) defect("it is truncated");
    const std::byte first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }

  std::uint64_t varint() {
    std::uint64_t number = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto part = std::to_integer<std::uint64_t>(byte());
      if (shift == 63 && part > 1) break;
      number |= (part & 0x7f) << shift;
      if ((part & 0x80) == 0) return number;
    }
    defect("a number has more than 64 bits");
  }

  /// Reads a count of items that take at least `each` bytes. The count cannot exceed the remaining bytes, less the
  /// bytes that the enclosing containers still need. All memory that is reserved at one time is thereby bounded by the
  /// length of the input, whatever the depth.
  std::size_t count(std::size_t each) {
    const std::uint64_t number = varint();
    if (bytes_.size() < owed_ || number > (bytes_.size() - owed_) / each) defect("a count exceeds its bytes");
    return number;
  }

  std::string text() {
    const std::size_t length = count(1);
    std::string string(reinterpret_cast<const char*>(bytes_.data()), length);
    bytes_ = bytes_.subspan(length);
    if (!is_utf8(string)) defect("a text is not valid UTF-8");
    return string;
  }

  Config value(int depth) {
    if (depth > max_config_depth) defect("it is nested too deeply");
    switch (static_cast<ValueTag>(byte())) {
      case ValueTag::null:
        return {};
      case ValueTag::no:
        return false;
      case ValueTag::yes:
        return true;
      case ValueTag::integer: {
        const std::uint64_t zigzag = varint();
        return static_cast<std::int64_t>((zigzag >> 1) ^ (~(zigzag & 1) + 1));
      }
      case ValueTag::unsigned_integer:
        return varint();
      case ValueTag::real: {
        double number = 0;
        if (bytes_.size() < sizeof number) defect("it is truncated");
        std::memcpy(&number, bytes_.data(), sizeof number);
        bytes_ = bytes_.subspan(sizeof number);
        return number;
      }
      case ValueTag::string:
        return text();
      case ValueTag::array: {
        ConfigArray items;
        const std::size_t length = count(1);
        items.reserve(length);
        owed_ += length;
        for (std::size_t i = 0; i < length; ++i) {
          --owed_;
          items.push_back(value(depth + 1));
        }
        return items;
      }
      case ValueTag::object: {
        ConfigObject members;
        const std::size_t length = count(2);
        members.reserve(length);
        owed_ += 2 * length;
        for (std::size_t i = 0; i < length; ++i) {
          owed_ -= 2;
          std::string key = text();
          if (!members.insert(std::move(key), value(depth + 1))) defect("an object has a key twice");
        }
        return members;
      }
      case ValueTag::slot_tensor:
        return tensor(false);
      case ValueTag::arena_tensor:
        return tensor(true);
    }
    defect("unknown tag of a value");
  }

  struct Kind {
    DType dtype;
    Shape shape;
    std::uint64_t nbytes;
  };

  Config tensor(bool is_in_arena) {
    const std::uint64_t number = varint();
    if (number > kinds_.size()) defect("unknown tensor kind");
    if (number == kinds_.size()) new_kind();
    const Kind& kind = kinds_[number];
    TensorLocation place;
    if (is_in_arena) {
      const std::uint64_t segment = varint();
      if (segment == 0 || segment > UINT32_MAX) defect("the number of an arena is out of range");
      place = {static_cast<std::uint32_t>(segment), varint()};
    } else {
      place.offset = lay_out(kind.nbytes);
    }
    return make_(kind.dtype, kind.shape, kind.nbytes, place);
  }

  std::uint64_t lay_out(std::uint64_t nbytes) {
    try {
      return layout_.place(nbytes);
    } catch (const Error&) {
      defect("the tensors have more bytes than 63 bits can count");
    }
  }

  void new_kind() {
    const auto dtype = dtype_from_number(std::to_integer<std::uint8_t>(byte()));
    if (!dtype) defect("unknown dtype");
    const std::size_t dimensions = count(1);
    if (dimensions > most_dimensions) defect("a tensor has too many dimensions");
    Shape shape(dimensions);
    for (std::int64_t& extent : shape) {
      const std::uint64_t number = varint();
      if (number > static_cast<std::uint64_t>(INT64_MAX)) defect("a dimension is larger than 63 bits can count");
      extent = static_cast<std::int64_t>(number);
    }
    try {
      const std::uint64_t nbytes = byte_size(*dtype, shape);
      kinds_.push_back({*dtype, std::move(shape), nbytes});
    } catch (const Error&) {
      defect("a tensor has more bytes than 63 bits can count");
    }
  }

  std::span<const std::byte> bytes_;
  const std::function<Tensor(DType, const Shape&, std::uint64_t, TensorLocation)>& make_;
  std::vector<Kind> kinds_;
  SlotLayout layout_;
  std::size_t owed_ = 0;  // minimum size of the items that have not been read yet
};

}  // namespace

std::uint64_t SlotLayout::place(std::uint64_t nbytes) {
  constexpr std::uint64_t most = INT64_MAX;
  const std::uint64_t offset = (size_ + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
  if (nbytes > most || offset > most - nbytes)
    throw Error(ErrorKind::invalid_argument, "config: its tensors have more bytes than 63 bits can count");
  if (nbytes == 0) return size_;
  size_ = offset + nbytes;
  return offset;
}

std::vector<std::byte> encode_descriptor(
    const Config& config, const std::function<std::optional<TensorLocation>(const Tensor&)>& place_elsewhere) {
  Encoder encoder(place_elsewhere);
  encoder.value(config, 0);
  return encoder.take();
}

Config decode_descriptor(std::span<const std::byte> bytes,
                         const std::function<Tensor(DType, const Shape&, std::uint64_t, TensorLocation)>& make) {
  return DescriptorDecoder(bytes, make).whole();
}

}  // namespace muster::core
