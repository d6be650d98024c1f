// SPDX-License-Identifier: Apache-2.0
#pragma once
// What torch.save writes: a pickle and, beside it, the storages that its tensors look at. As a zip archive, which may
// be a stretch of a larger file, or as the older run of pickles.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/error.hpp"
#include "muster/tensor.hpp"
#include "src/checkpoint/foreign/parted_tensors.hpp"
#include "src/formats/pickle.hpp"
#include "src/os/file.hpp"

namespace muster::foreign {

using formats::Pickle;
using formats::PickleKind;

/// What is wrong with a file that is being read.
[[noreturn]] inline void refuse_foreign(const std::string& what, ErrorKind kind = ErrorKind::corrupt) {
  throw Error(kind, what);
}

/// The dtype of "torch.float32"; none if there is none here.
std::optional<DType> dtype_of_torch(std::string_view name) noexcept;
/// "float32"; empty if torch has none.
std::string_view torch_name(DType dtype) noexcept;
/// Numbers of a tuple, a list or a torch.Size. Throws Error(corrupt) if it is none, or one is negative.
Shape shape_of(const Pickle& pickle, Pickle::Ref ref);

/// A tensor of an archive.
struct TorchTensor {
  DType dtype = DType::u8;
  Shape shape;
  Strides strides;          ///< in elements, none negative
  std::uint64_t begin = 0;  ///< of the first element, in the file
  StoredBytes stored;       ///< its storage

  /// As a box of box_extents(shape).
  [[nodiscard]] BoxPlace place_in(std::uint32_t file) const {
    return {file, begin, shape.empty() ? Strides{1} : strides, stored};
  }
};

/// As long as the file. Immutable.
class TorchArchive {
 public:
  /// A file, by its first bytes a zip archive or of the older format. Throws Error(corrupt | unsupported), and
  /// Error(io).
  static TorchArchive open(const os::ReadableFile& file);
  /// A zip archive of `bytes`. Throws likewise, and what `read` throws.
  static TorchArchive open_zip(const formats::ReadAt& read, std::uint64_t bytes);
  /// Whether bytes that a file begins with are those of either format.
  static bool is_torch(std::span<const std::byte> head) noexcept;

  [[nodiscard]] const Pickle& pickle() const noexcept { return pickle_; }
  /// Whether a node stands for a tensor, of whatever kind.
  [[nodiscard]] bool is_tensor(Pickle::Ref ref) const noexcept;
  /// Throws Error(unsupported) if it is a kind that is not read, Error(corrupt) if it is not inside its storage, or has
  /// more than 1024 times its bytes.
  [[nodiscard]] TorchTensor tensor(Pickle::Ref ref) const;
  /// What a Parameter and the like has in it: the tensor itself, if `ref` is one.
  [[nodiscard]] Pickle::Ref unwrapped(Pickle::Ref ref) const noexcept;

 private:
  struct StoragePid {
    std::string_view key;
    std::optional<DType> dtype;  ///< none: untyped
    std::uint64_t bytes = 0;
  };
  void read_zip(const formats::ReadAt& read, std::uint64_t bytes);
  void open_legacy(const os::ReadableFile& file);
  [[nodiscard]] StoragePid read_pid(Pickle::Ref ref) const;

  std::vector<std::byte> bytes_;  // of the pickle
  Pickle pickle_;
  std::unordered_map<std::string, StoredBytes> storages_;
};

/// The dict of tensors in an archive: the root, or what `at` names ("model", "state/ema"), or the one of the usual keys
/// that has tensors. Throws Error(not_found) with the keys that there are.
Pickle::Ref find_weights(const TorchArchive& archive, const std::string& at);
/// Calls work(name, ref) for each tensor below a node; names of nested dicts are joined by dots. What is no tensor is
/// passed over. Throws Error(corrupt) where nodes are nested too deeply.
void for_each_tensor(const TorchArchive& archive, Pickle::Ref ref,
                     const std::function<void(const std::string&, Pickle::Ref)>& work);

}  // namespace muster::foreign
