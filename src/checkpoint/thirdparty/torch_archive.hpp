// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of torch.save: a pickle and the storages of its tensors. The format is a zip archive, which may be a range of a
// larger file, or the older sequence of pickles.

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
#include "src/checkpoint/thirdparty/parted_tensors.hpp"
#include "src/formats/pickle.hpp"
#include "src/os/file.hpp"

namespace muster::thirdparty {

using formats::Pickle;
using formats::PickleKind;

/// Throws the error for a defect of the file that is being read.
[[noreturn]] inline void refuse_foreign(const std::string& what, ErrorKind kind = ErrorKind::corrupt) {
  throw Error(kind, what);
}

/// Returns the dtype for a name such as "torch.float32"; nullopt if Muster has no such dtype.
std::optional<DType> dtype_of_torch(std::string_view name) noexcept;
/// Returns a name such as "float32"; empty if torch has no such dtype.
std::string_view torch_name(DType dtype) noexcept;
/// Returns the numbers of a tuple, a list or a torch.Size. Throws Error(corrupt) if it is not one of these, or a number
/// is negative.
Shape shape_of(const Pickle& pickle, Pickle::Ref ref);

/// A tensor of an archive.
struct TorchTensor {
  DType dtype = DType::u8;
  Shape shape;
  Strides strides;          ///< in elements, never negative
  std::uint64_t begin = 0;  ///< offset of the first element in the file
  StoredBytes stored;       ///< the range of its storage

  /// Returns the location as a box of box_extents(shape).
  [[nodiscard]] BoxPlace place_in(std::uint32_t file) const {
    return {file, begin, shape.empty() ? Strides{1} : strides, stored};
  }
};

/// Valid as long as the file. Immutable.
class TorchArchive {
 public:
  /// Opens a file, which is a zip archive or has the older format, according to its first bytes. Throws Error(corrupt |
  /// unsupported), and Error(io).
  static TorchArchive open(const os::ReadableFile& file);
  /// Opens a zip archive of `bytes` bytes. Throws as open(), and what `read` throws.
  static TorchArchive open_zip(const formats::ReadAt& read, std::uint64_t bytes);

  [[nodiscard]] const Pickle& pickle() const noexcept { return pickle_; }
  /// Whether a node represents a tensor of any kind.
  [[nodiscard]] bool is_tensor(Pickle::Ref ref) const noexcept;
  /// Returns a tensor. Throws Error(unsupported) for kinds that are not supported, and Error(corrupt) if it is not
  /// inside its storage, or has more than 1024 times its bytes.
  [[nodiscard]] TorchTensor tensor(Pickle::Ref ref) const;
  /// Returns the tensor inside a Parameter or a similar wrapper; a tensor is returned unchanged.
  [[nodiscard]] Pickle::Ref unwrapped(Pickle::Ref ref) const noexcept;

 private:
  struct StoragePid {
    std::string_view key;
    std::optional<DType> dtype;  ///< nullopt: untyped
    std::uint64_t bytes = 0;     ///< of the whole storage
    std::uint64_t begin = 0;     ///< start of the view, in bytes
    std::uint64_t viewed = 0;    ///< length of the view; without a view, that of the storage
  };
  void read_zip(const formats::ReadAt& read, std::uint64_t bytes);
  void open_legacy(const os::ReadableFile& file);
  [[nodiscard]] StoragePid read_pid(Pickle::Ref ref) const;

  std::vector<std::byte> bytes_;  // of the pickle
  Pickle pickle_;
  std::unordered_map<std::string, StoredBytes> storages_;
};

/// The container of an archive's weights.
struct TorchWeights {
  Pickle::Ref ref = 0;
  std::vector<Pickle::Ref> without = {};  ///< members of it that are not weights: the state of an optimizer
};
/// The value of `at` that selects the whole root.
inline constexpr std::string_view whole_root = ".";
/// Returns the container that `at` names ("model", "state/ema"). If `at` is empty, returns the one of the usual keys
/// that has tensors, or the root if its own tensors are the weights. Throws Error(not_found) that lists the keys.
TorchWeights find_weights(const TorchArchive& archive, const std::string& at);
/// Calls work(name, ref) for each tensor of the weights; dots join the names of nested dicts. `left_out` gets an
/// omission for each place with tensors that were not passed to `work`: below keys that are neither text nor numbers,
/// in other objects, and next to the weights. Throws Error(corrupt) where nodes are nested too deeply.
using TensorWork = std::function<void(const std::string&, Pickle::Ref)>;
void for_each_tensor(const TorchArchive& archive, const TorchWeights& weights, const TensorWork& work,
                     Omissions* left_out = nullptr);

}  // namespace muster::thirdparty
