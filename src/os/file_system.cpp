// SPDX-License-Identifier: Apache-2.0
#include "src/os/file_system.hpp"

#include <fmt/core.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>

#include "src/os/fault.hpp"

namespace muster::os {
namespace {

struct Known {
  std::uint32_t magic;
  const char* type;
  bool is_network;
};

// Numbers of statfs(2) and of the file systems' own sources.
constexpr std::array<Known, 33> known = {{
    {0x6969, "nfs", true},          {0xff534d42, "cifs", true},   {0xfe534d42, "smb2", true},
    {0x517b, "smb", true},          {0x65735546, "fuse", true},   {0x01021997, "9p", true},
    {0x0bd00bd0, "lustre", true},   {0x47504653, "gpfs", true},   {0x00c36400, "ceph", true},
    {0x5346414f, "afs", true},      {0x73757245, "coda", true},   {0x7461636f, "ocfs2", true},
    {0x01161970, "gfs2", true},     {0x19830326, "beegfs", true}, {0xaad7aaea, "panfs", true},
    {0x20030528, "orangefs", true}, {0x786f4256, "vboxsf", true}, {0xef53, "ext4", false},
    {0x58465342, "xfs", false},     {0x9123683e, "btrfs", false}, {0xf2f52010, "f2fs", false},
    {0x2fc12fc1, "zfs", false},     {0x01021994, "tmpfs", false}, {0x858458f6, "ramfs", false},
    {0x794c7630, "overlay", false}, {0x4d44, "vfat", false},      {0x73717368, "squashfs", false},
    {0xe0f5e1e2, "erofs", false},   {0x9660, "iso9660", false},   {0xca451a4e, "bcachefs", false},
    {0x2011bab0, "exfat", false},   {0x3153464a, "jfs", false},   {0x3434, "nilfs2", false},
}};

FileSystem describe(const std::string& path, const std::function<int(struct statfs*)>& ask) {
  struct statfs status {};
  int result = 0;
  do {
    const int injected = fault("statfs", path);
    if (injected > 0) errno = injected;
    result = injected > 0 ? -1 : ask(&status);
  } while (result != 0 && errno == EINTR);
  if (result != 0) throw errno_error("asking for the file system of", errno, path);
  FileSystem system;
  const auto magic = static_cast<std::uint32_t>(status.f_type);
  const auto* found = std::ranges::find(known, magic, &Known::magic);
  system.type = found == known.end() ? fmt::format("{:#x}", magic) : found->type;
  system.is_network = found == known.end() || found->is_network;
  system.free_bytes = static_cast<std::uint64_t>(status.f_bavail) * static_cast<std::uint64_t>(status.f_bsize);
  return system;
}

}  // namespace

FileSystem file_system_of(const std::string& path) {
  return describe(path, [&](struct statfs* status) { return ::statfs(path.c_str(), status); });
}

FileSystem file_system_of(const Fd& file, const std::string& path) {
  return describe(path, [&](struct statfs* status) { return ::fstatfs(file.get(), status); });
}

}  // namespace muster::os
