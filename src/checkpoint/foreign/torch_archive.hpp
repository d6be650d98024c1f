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
#include "muster/omission.hpp"
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
    std::uint64_t bytes = 0;     ///< of the whole storage
    std::uint64_t begin = 0;     ///< of the view, in bytes
    std::uint64_t viewed = 0;    ///< its length; without a view that of the storage
  };
  void read_zip(const formats::ReadAt& read, std::uint64_t bytes);
  void open_legacy(const os::ReadableFile& file);
  [[nodiscard]] StoragePid read_pid(Pickle::Ref ref) const;

  std::vector<std::byte> bytes_;  // of the pickle
  Pickle pickle_;
  std::unordered_map<std::string, StoredBytes> storages_;
};

/// The container of an archive that has the weights.
struct TorchWeights {
  Pickle::Ref ref = 0;
  std::vector<Pickle::Ref> without = {};  ///< members of it that are no weights: the state of an optimizer
};
/// `at` for the whole root.
inline constexpr std::string_view whole_root = ".";
/// Returns the container that `at` names ("model", "state/ema"). If `at` is empty, returns the one of the usual keys
/// that has tensors, or the root if its own tensors are the weights. Throws Error(not_found) that lists the keys.
TorchWeights find_weights(const TorchArchive& archive, const std::string& at);
/// Calls work(name, ref) for each tensor of the weights; dots join the names of nested dicts. `left_out` gets an
/// omission for each place with tensors that were not passed to `work`: below keys that are neither text nor numbers,
/// in other objects, and beside the weights. Throws Error(corrupt) where nodes are nested too deeply.
using TensorWork = std::function<void(const std::string&, Pickle::Ref)>;
void for_each_tensor(const TorchArchive& archive, const TorchWeights& weights, const TensorWork& work,
                     Omissions* left_out = nullptr);

}  // namespace muster::foreign
