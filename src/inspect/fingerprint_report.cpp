// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include "src/core/checksum.hpp"
#include "src/inspect/reports.hpp"

namespace muster::inspect {
namespace {

Config spec_tree(const TensorFingerprint& tensor) {
  return Config::object({{"dtype", to_string(tensor.spec.dtype)},
                         {"shape", extents_of(tensor.spec.shape)},
                         {"crc", checksum_text(tensor.crc)}});
}

Config tensors_tree(const Fingerprint& fingerprint) {
  return list_of(fingerprint.tensors, [](const TensorFingerprint& tensor) {
    Config tree = spec_tree(tensor);
    tree["name"] = tensor.name;
    return tree;
  });
}

}  // namespace

Config fingerprint_tree(const Fingerprint& fingerprint) {
  return Config::object({{"hash", fingerprint.hash()}, {"tensors", tensors_tree(fingerprint)}});
}

Config fingerprint_tree(const std::string& path, const Fingerprint& fingerprint) {
  return Config::object({{"path", path}, {"hash", fingerprint.hash()}, {"tensors", tensors_tree(fingerprint)}});
}

Config fingerprint_check_tree(const std::string& path, const std::string& file, const Fingerprint& expected,
                              const Fingerprint& found) {
  const std::vector<FingerprintDifference> all = differences(expected, found);
  const auto side = [](const std::optional<TensorFingerprint>& tensor) {
    return tensor ? spec_tree(*tensor) : Config();
  };
  return Config::object({{"same", all.empty()},
                         {"path", path},
                         {"file", file},
                         {"hash", found.hash()},
                         {"expected_hash", expected.hash()},
                         {"compared", found.tensors.size()},
                         {"differences", list_of(all, [&](const FingerprintDifference& difference) {
                            return Config::object({{"name", difference.name()},
                                                   {"kind", to_string(difference.defect)},
                                                   {"expected", side(difference.expected)},
                                                   {"found", side(difference.found)}});
                          })}});
}

std::string fingerprint_check_text(const Fingerprint& expected, const Fingerprint& found) {
  const std::vector<FingerprintDifference> all = differences(expected, found);
  if (all.empty()) return fmt::format("same: {}, model {}\n", counted(found.tensors.size(), "tensor"), found.hash());
  std::string text;
  for (const FingerprintDifference& difference : all) text += fmt::format("tensor {}\n", to_string(difference));
  return text + fmt::format("different: {} (compared: {})\n", counted(all.size(), "tensor"),
                            counted(found.tensors.size(), "tensor"));
}

}  // namespace muster::inspect
