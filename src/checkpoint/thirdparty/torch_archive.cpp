// SPDX-License-Identifier: Apache-2.0
// The two formats of torch.save.
//
// Zip: ROOT/data.pkl, ROOT/data/KEY for each storage, ROOT/byteorder. An archive with ROOT/constants.pkl is a program
// (TorchScript).
// Older: five pickles (a magic number, the version, facts of the system, the object, the keys of the storages in their
// order). Then, for each storage, its number of elements as eight bytes, and its elements.

#include "src/checkpoint/thirdparty/torch_archive.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/formats/file_kind.hpp"
#include "src/formats/zip.hpp"

namespace muster::thirdparty {
namespace {

constexpr std::uint64_t longest_pickle_entry = std::uint64_t{1} << 30;

struct NamedDType {
  std::string_view name;
  DType dtype;
};

std::optional<DType> look_up(std::span<const NamedDType> names, std::string_view name) noexcept {
  const auto found = std::ranges::find(names, name, &NamedDType::name);
  return found == names.end() ? std::nullopt : std::optional(found->dtype);
}

/// Returns the dtype of "torch.FloatStorage" or "torch.cuda.FloatStorage".
std::optional<DType> dtype_of_storage(std::string_view name) noexcept {
  static constexpr std::array<NamedDType, 11> names = {{{"Float", DType::f32},
                                                        {"BFloat16", DType::bf16},
                                                        {"Half", DType::f16},
                                                        {"Double", DType::f64},
                                                        {"Long", DType::i64},
                                                        {"Int", DType::i32},
                                                        {"Short", DType::i16},
                                                        {"Char", DType::i8},
                                                        {"Byte", DType::u8},
                                                        {"Bool", DType::boolean},
                                                        {"ComplexFloat", DType::complex64}}};
  for (const std::string_view prefix : {"torch.", "cuda."})
    if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  constexpr std::string_view end = "Storage";
  if (!name.ends_with(end)) return std::nullopt;
  name.remove_suffix(end.size());
  return look_up(names, name);
}

constexpr std::string_view torch_prefix = "torch.";
constexpr std::array<NamedDType, 19> torch_dtypes = {{{"float32", DType::f32},
                                                      {"bfloat16", DType::bf16},
                                                      {"float16", DType::f16},
                                                      {"float64", DType::f64},
                                                      {"int64", DType::i64},
                                                      {"int32", DType::i32},
                                                      {"int16", DType::i16},
                                                      {"int8", DType::i8},
                                                      {"uint8", DType::u8},
                                                      {"bool", DType::boolean},
                                                      {"uint16", DType::u16},
                                                      {"uint32", DType::u32},
                                                      {"uint64", DType::u64},
                                                      {"float8_e4m3fn", DType::f8_e4m3fn},
                                                      {"float8_e5m2", DType::f8_e5m2},
                                                      {"float8_e8m0fnu", DType::f8_e8m0},
                                                      {"float8_e4m3fnuz", DType::f8_e4m3fnuz},
                                                      {"float8_e5m2fnuz", DType::f8_e5m2fnuz},
                                                      {"complex64", DType::complex64}}};

constexpr std::string_view rebuild_v1 = "torch._utils._rebuild_tensor";  // before PyTorch 0.4
constexpr std::string_view rebuild_v2 = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view rebuild_v3 = "torch._utils._rebuild_tensor_v3";
constexpr std::string_view rebuild_typed = "torch._tensor._rebuild_from_type_v2";
constexpr std::string_view rebuild_on_device = "torch._utils._rebuild_device_tensor_from_cpu_tensor";

/// "torch.FloatTensor": the oldest files construct one from its storage, offset, shape and strides.
bool is_tensor_class(std::string_view name) {
  return name.ends_with("Tensor") && (name == "torch.Tensor" || name == "torch._tensor.Tensor" ||
                                      dtype_of_storage(std::string(name.substr(0, name.size() - 6)) + "Storage"));
}

std::uint64_t read_length(const os::ReadableFile& file, std::uint64_t at) {
  std::uint64_t value = 0;
  file.read_at(at, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

/// Reads a pickle of the older format that begins at `at`, and sets `at` to its end. `bytes` owns the memory to which
/// the pickle refers. The length is known only after reading.
Pickle read_pickle(const os::ReadableFile& file, std::uint64_t& at, std::vector<std::byte>& bytes) {
  constexpr std::uint64_t first_window = 64 << 10;
  const std::uint64_t most = std::min(file.bytes() - at, longest_pickle_entry);
  for (std::uint64_t window = first_window;; window *= 8) {
    bytes.resize(std::min(window, most));
    file.read_at(at, bytes);
    try {
      std::size_t used = 0;
      Pickle pickle = Pickle::parse(bytes, &used);
      at += used;
      return pickle;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corrupt || bytes.size() == most) throw;
    }
  }
}

}  // namespace

std::optional<DType> dtype_of_torch(std::string_view name) noexcept {
  if (!name.starts_with(torch_prefix)) return std::nullopt;
  return look_up(torch_dtypes, name.substr(torch_prefix.size()));
}

std::string_view torch_name(DType dtype) noexcept {
  const auto found = std::ranges::find(torch_dtypes, dtype, &NamedDType::dtype);
  return found == torch_dtypes.end() ? std::string_view() : found->name;
}

Shape shape_of(const Pickle& pickle, Pickle::Ref ref) {
  if (pickle.is(ref, PickleKind::object) && pickle.name(ref) == "torch.Size" && pickle.arguments(ref).size() == 1)
    ref = pickle.arguments(ref)[0];
  if (!pickle.is(ref, PickleKind::tuple) && !pickle.is(ref, PickleKind::list))
    refuse_foreign(fmt::format("malformed shape: it is {}", formats::to_string(pickle.kind(ref))));
  Shape shape;
  constexpr std::size_t most_dims = 64;
  if (pickle.items(ref).size() > most_dims) refuse_foreign("malformed shape: it has more than 64 dimensions");
  for (const Pickle::Ref item : pickle.items(ref)) {
    const std::optional<std::int64_t> extent = pickle.integer(item);
    if (!extent || *extent < 0) refuse_foreign("malformed shape: an extent is not a number from 0");
    shape.push_back(*extent);
  }
  return shape;
}

TorchArchive TorchArchive::open(const os::ReadableFile& file) {
  const formats::FileKind kind = formats::kind_of_file(file);
  if (kind == formats::FileKind::zip)
    return open_zip([&file](std::uint64_t at, std::span<std::byte> target) { file.read_at(at, target); }, file.bytes());
  if (kind != formats::FileKind::torch_legacy) {
    const std::string_view advice = formats::advice_about(kind);
    refuse_foreign(advice.empty() ? "not a file of torch.save"
                                  : fmt::format("not a file of torch.save but {}", advice));
  }
  TorchArchive archive;
  archive.open_legacy(file);
  return archive;
}

TorchArchive TorchArchive::open_zip(const formats::ReadAt& read, std::uint64_t bytes) {
  TorchArchive archive;
  archive.read_zip(read, bytes);
  return archive;
}

void TorchArchive::read_zip(const formats::ReadAt& read, std::uint64_t bytes) {
  formats::ZipArchive zip(read, bytes);
  const auto is_below = [](std::string_view name, std::string_view end) {
    return name.ends_with(end) && name.find('/') == name.size() - end.size();
  };
  const formats::ZipEntry* data = nullptr;
  for (const formats::ZipEntry& entry : zip.entries()) {
    if (is_below(entry.name, "/constants.pkl"))
      refuse_foreign("the file is a TorchScript program, not a dict of tensors. Save the state_dict() of the module",
                     ErrorKind::unsupported);
    if (!is_below(entry.name, "/data.pkl")) continue;
    if (data != nullptr) refuse_foreign("the entry data.pkl is duplicated");
    data = &entry;
  }
  if (data == nullptr) refuse_foreign("not a file of torch.save: the zip archive has no data.pkl");
  const std::string root = data->name.substr(0, data->name.find('/') + 1);
  const std::string pickle_name = data->name;
  zip.locate();
  const std::string storage_prefix = root + "data/";
  for (const formats::ZipEntry& entry : zip.entries()) {
    if (!entry.name.starts_with(root))
      refuse_foreign(fmt::format("entry {} is not below {}", in_quotes(entry.name), in_quotes(root)));
    if (entry.name.starts_with(storage_prefix))
      storages_.emplace(entry.name.substr(storage_prefix.size()), StoredBytes{entry.begin, entry.bytes, entry.crc});
    if (entry.name == root + "byteorder") {
      const std::vector<std::byte> order = zip.read(entry, 16);
      if (std::string_view(reinterpret_cast<const char*>(order.data()), order.size()) != "little")
        refuse_foreign("the file is big-endian, which Muster cannot read. Save it again on a little-endian machine",
                       ErrorKind::unsupported);
    }
    if (entry.name == pickle_name) bytes_ = zip.read(entry, longest_pickle_entry);
  }
  pickle_ = Pickle::parse(bytes_);
}

void TorchArchive::open_legacy(const os::ReadableFile& file) {
  std::uint64_t at = 0;
  std::vector<std::byte> memory;
  read_pickle(file, at, memory);  // the magic number, by which the file was recognised
  const Pickle version = read_pickle(file, at, memory);
  if (version.integer(version.root()) != 1001)
    refuse_foreign(
        "the file has an unknown version of the older format of torch.save. Save it again with PyTorch 1.6 or later",
        ErrorKind::unsupported);
  const Pickle system = read_pickle(file, at, memory);
  if (const auto little = system.find(system.root(), "little_endian"); little && system.integer(*little) != 1)
    refuse_foreign("the file is big-endian, which Muster cannot read. Save it again on a little-endian machine",
                   ErrorKind::unsupported);
  pickle_ = read_pickle(file, at, bytes_);
  const Pickle keys = read_pickle(file, at, memory);
  std::unordered_map<std::string_view, std::uint64_t> sizes;
  for (Pickle::Ref ref = 0; ref < pickle_.size(); ++ref) {
    if (!pickle_.is(ref, PickleKind::persistent)) continue;
    // The source text of a pickled class, which is never executed.
    if (const auto id = pickle_.arguments(ref); !id.empty() && pickle_.text(id[0]) == "module") continue;
    const StoragePid pid = read_pid(ref);
    if (!sizes.try_emplace(pid.key, pid.bytes).second && sizes[pid.key] != pid.bytes)
      refuse_foreign(fmt::format("storage {} has two sizes", in_quotes(pid.key)));
  }
  for (const Pickle::Ref item : keys.items(keys.root())) {
    const std::string_view key = keys.text(item);
    const auto size = sizes.find(key);
    if (size == sizes.end()) refuse_foreign(fmt::format("storage {} belongs to no tensor", in_quotes(key)));
    if (file.bytes() - at < sizeof(std::uint64_t)) refuse_foreign("truncated file: a storage is incomplete");
    const std::uint64_t count = read_length(file, at);
    at += sizeof(std::uint64_t);
    if (size->second > file.bytes() - at || (count != 0 && size->second % count != 0) ||
        (count == 0) != (size->second == 0))
      refuse_foreign(fmt::format("storage {}: it is truncated, or its size contradicts its tensors", in_quotes(key)));
    if (!storages_.emplace(key, StoredBytes{at, size->second}).second)
      refuse_foreign(fmt::format("storage {} is duplicated", in_quotes(key)));
    at += size->second;
  }
  if (at != file.bytes()) refuse_foreign(fmt::format("{} bytes follow the last storage", file.bytes() - at));
}

TorchArchive::StoragePid TorchArchive::read_pid(Pickle::Ref ref) const {
  const std::span<const Pickle::Ref> pid = pickle_.arguments(ref);
  if (pid.size() < 5 || pickle_.text(pid[0]) != "storage")
    refuse_foreign("it refers to an object that is not a storage");
  StoragePid out;
  out.key = pickle_.text(pid[2]);
  const std::string_view type = pickle_.name(pid[1]);
  out.dtype = dtype_of_storage(type);
  const bool is_untyped = type == "torch.storage.UntypedStorage" || type == "torch.storage._UntypedStorage" ||
                          type == "torch.UntypedStorage" || type == "torch.cuda.UntypedStorage";
  if (!out.dtype && !is_untyped)
    refuse_foreign(fmt::format("unsupported type of storage {}. Save its tensors in another dtype", in_quotes(type)),
                   ErrorKind::unsupported);
  const std::uint64_t item = out.dtype ? itemsize(*out.dtype) : 1;
  const auto bytes_of = [&](Pickle::Ref number) {
    std::uint64_t bytes = 0;
    const std::optional<std::uint64_t> count = pickle_.count(number);
    if (!count || __builtin_mul_overflow(*count, item, &bytes))
      refuse_foreign("malformed storage: the number of elements is missing");
    return bytes;
  };
  out.bytes = out.viewed = bytes_of(pid[4]);
  if (pid.size() < 6 || pickle_.is(pid[5], PickleKind::none)) return out;
  // A view of a storage: its own key, start and length.
  const std::span<const Pickle::Ref> view = pickle_.items(pid[5]);
  if (pid.size() > 6 || view.size() != 3)
    refuse_foreign("malformed view of a storage: it is not a key and two numbers");
  out.begin = bytes_of(view[1]);
  out.viewed = bytes_of(view[2]);
  if (out.begin > out.bytes || out.viewed > out.bytes - out.begin)
    refuse_foreign("a view of a storage is out of range");
  return out;
}

Pickle::Ref TorchArchive::unwrapped(Pickle::Ref ref) const noexcept {
  static constexpr std::array<std::string_view, 5> wrappers = {
      "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch.nn.parameter.Parameter",
      "torch.nn.parameter.Buffer", "torch.autograd.variable.Variable"};
  if (!pickle_.is(ref, PickleKind::object) || std::ranges::find(wrappers, pickle_.name(ref)) == wrappers.end())
    return ref;
  if (!pickle_.arguments(ref).empty()) return pickle_.arguments(ref)[0];
  // The oldest parameters are created empty and get their tensor from a state of five items.
  const auto state = pickle_.state(ref);
  return state && pickle_.items(*state).size() == 5 ? pickle_.items(*state)[0] : ref;
}

bool TorchArchive::is_tensor(Pickle::Ref ref) const noexcept {
  if (!pickle_.is(ref, PickleKind::object)) return false;
  const std::string_view name = pickle_.name(ref);
  return name.starts_with("torch._utils._rebuild_") || name == rebuild_typed || unwrapped(ref) != ref ||
         (is_tensor_class(name) && pickle_.state(ref));
}

TorchTensor TorchArchive::tensor(Pickle::Ref ref) const {
  ref = unwrapped(ref);
  std::string_view name = pickle_.name(ref);
  std::span<const Pickle::Ref> arguments = pickle_.arguments(ref);
  if (name == rebuild_typed && arguments.size() >= 3) {
    const std::string_view type = pickle_.name(arguments[1]);
    if (type != "torch.Tensor" && type != "torch._tensor.Tensor" && type != "torch.nn.parameter.Parameter")
      refuse_foreign(fmt::format("it is a {}, which Muster cannot read. Save it as a torch.Tensor", in_quotes(type)),
                     ErrorKind::unsupported);
    name = pickle_.name(arguments[0]);
    arguments = pickle_.items(arguments[2]);
  }
  if (name == rebuild_on_device && arguments.size() >= 2 && pickle_.name(arguments[0]) == rebuild_v2) {
    TorchTensor on_cpu = tensor(arguments[0]);
    if (dtype_of_torch(pickle_.name(arguments[1])) != on_cpu.dtype)
      refuse_foreign("its stored dtype differs from its own, which Muster cannot read. Save it on the CPU",
                     ErrorKind::unsupported);
    return on_cpu;
  }
  bool is_oldest = name == rebuild_v1;
  if (is_tensor_class(name) && pickle_.state(ref)) {
    arguments = pickle_.items(*pickle_.state(ref));
    is_oldest = true;
  }
  const bool has_dtype = name == rebuild_v3;
  if ((name != rebuild_v2 && !has_dtype && !is_oldest) || arguments.size() < (has_dtype ? 7U : is_oldest ? 4U : 6U))
    refuse_foreign(
        fmt::format("it is made by {}, which Muster cannot read. Save it as a dense torch.Tensor", in_quotes(name)),
        ErrorKind::unsupported);
  const std::size_t metadata = has_dtype ? 7 : 6;
  if (arguments.size() > metadata && !pickle_.is(arguments[metadata], PickleKind::none))
    for (const std::string_view bit : {"conj", "neg"})
      if (const auto set = pickle_.find(arguments[metadata], bit); set && pickle_.integer(*set) != 0)
        refuse_foreign(fmt::format("it has the {} bit, which Muster cannot read. Save its resolve_{}()", bit, bit),
                       ErrorKind::unsupported);
  if (!pickle_.is(arguments[0], PickleKind::persistent)) refuse_foreign("it has no storage");
  const StoragePid pid = read_pid(arguments[0]);
  TorchTensor tensor;
  if (has_dtype) {
    const std::optional<DType> dtype = dtype_of_torch(pickle_.name(arguments[6]));
    if (!dtype)
      refuse_foreign(
          fmt::format("unsupported dtype {}. Save the tensor in another dtype", in_quotes(pickle_.name(arguments[6]))),
          ErrorKind::unsupported);
    tensor.dtype = *dtype;
  } else {
    tensor.dtype = pid.dtype.value_or(DType::u8);  // as torch reads a storage of bytes
  }
  const auto storage = storages_.find(std::string(pid.key));
  if (storage == storages_.end()) refuse_foreign(fmt::format("its storage {} does not exist", in_quotes(pid.key)));
  if (storage->second.bytes != pid.bytes)
    refuse_foreign(
        fmt::format("its storage {} has {} bytes, expected {}", in_quotes(pid.key), storage->second.bytes, pid.bytes));
  tensor.shape = shape_of(pickle_, arguments[2]);
  tensor.strides = shape_of(pickle_, arguments[3]);
  if (tensor.shape.size() != tensor.strides.size()) refuse_foreign("the numbers of strides and dimensions differ");
  const std::optional<std::uint64_t> offset = pickle_.count(arguments[1]);
  if (!offset) refuse_foreign("its offset in the storage is missing");
  const std::uint64_t item = itemsize(tensor.dtype);
  const std::uint64_t bytes = byte_size(tensor.dtype, tensor.shape);
  if (bytes == 0) return tensor;
  std::uint64_t last = *offset;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(tensor.strides[i]),
                               static_cast<std::uint64_t>(tensor.shape[i] - 1), &step) ||
        __builtin_add_overflow(last, step, &last))
      last = UINT64_MAX;
    if (last == UINT64_MAX) break;
  }
  if (last >= pid.viewed / item) refuse_foreign("its elements are out of range of its storage");
  constexpr std::uint64_t most_times = 1024;
  if (bytes / most_times > storage->second.bytes)
    refuse_foreign(
        fmt::format("it would have {} bytes, made from the {} bytes of its storage", bytes, storage->second.bytes));
  tensor.begin = storage->second.begin + pid.begin + *offset * item;
  tensor.stored = storage->second;
  return tensor;
}

}  // namespace muster::thirdparty
