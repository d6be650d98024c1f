// SPDX-License-Identifier: Apache-2.0
// nfs_mount SERVER EXPORT MOUNTPOINT CACHE_SECONDS: mounts an NFS export through libnfs and FUSE, for machines whose
// kernel has no NFS client. It caches names, attributes and missing names for CACHE_SECONDS, like a client. Two mounts
// act like two hosts. It runs in the foreground until it is unmounted. It imitates NFS and is not the kernel's client.

#define FUSE_USE_VERSION 31
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <nfsc/libnfs.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

nfs_context* nfs = nullptr;
double cache_seconds = 3;

nfsfh* handle_of(const fuse_file_info* info) {
  return reinterpret_cast<nfsfh*>(info->fh);  // NOLINT: FUSE keeps it as a number
}

void keep(fuse_file_info* info, nfsfh* handle) {
  info->fh = reinterpret_cast<std::uint64_t>(handle);
}

struct stat status_of(const nfs_stat_64& from) {
  struct stat status {};
  status.st_ino = from.nfs_ino;
  status.st_mode = static_cast<mode_t>(from.nfs_mode);
  status.st_nlink = from.nfs_nlink;
  status.st_uid = static_cast<uid_t>(from.nfs_uid);
  status.st_gid = static_cast<gid_t>(from.nfs_gid);
  status.st_size = static_cast<off_t>(from.nfs_size);
  status.st_blksize = static_cast<blksize_t>(from.nfs_blksize);
  status.st_blocks = static_cast<blkcnt_t>(from.nfs_blocks);
  status.st_mtim = {static_cast<time_t>(from.nfs_mtime), static_cast<long>(from.nfs_mtime_nsec)};
  status.st_ctim = {static_cast<time_t>(from.nfs_ctime), static_cast<long>(from.nfs_ctime_nsec)};
  return status;
}

int do_getattr(const char* path, struct stat* status, fuse_file_info* info) {
  nfs_stat_64 from{};
  const int result =
      info != nullptr && info->fh != 0 ? nfs_fstat64(nfs, handle_of(info), &from) : nfs_lstat64(nfs, path, &from);
  if (result == 0) *status = status_of(from);
  return result;
}

int do_readdir(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*, fuse_readdir_flags) {
  nfsdir* directory = nullptr;
  if (const int result = nfs_opendir(nfs, path, &directory); result != 0) return result;
  while (const nfsdirent* entry = nfs_readdir(nfs, directory))
    fill(buffer, entry->name, nullptr, 0, fuse_fill_dir_flags{});
  nfs_closedir(nfs, directory);
  return 0;
}

int do_open(const char* path, fuse_file_info* info) {
  nfsfh* handle = nullptr;
  const int result = nfs_open(nfs, path, info->flags & (O_ACCMODE | O_TRUNC), &handle);
  if (result == 0) keep(info, handle);
  return result;
}

int do_create(const char* path, mode_t mode, fuse_file_info* info) {
  nfsfh* handle = nullptr;
  const int result = nfs_create(nfs, path, info->flags | O_CREAT, static_cast<int>(mode), &handle);
  if (result == 0) keep(info, handle);
  return result;
}

int do_read(const char*, char* buffer, size_t bytes, off_t offset, fuse_file_info* info) {
  size_t done = 0;
  while (done < bytes) {
    const int got =
        nfs_pread(nfs, handle_of(info), static_cast<std::uint64_t>(offset) + done, bytes - done, buffer + done);
    if (got < 0) return got;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<int>(done);
}

int do_write(const char*, const char* buffer, size_t bytes, off_t offset, fuse_file_info* info) {
  return nfs_pwrite(nfs, handle_of(info), static_cast<std::uint64_t>(offset), bytes, const_cast<char*>(buffer));
}

int do_truncate(const char* path, off_t length, fuse_file_info*) {
  return nfs_truncate(nfs, path, static_cast<std::uint64_t>(length));
}
int do_fsync(const char*, int, fuse_file_info* info) {
  return nfs_fsync(nfs, handle_of(info));
}
int do_release(const char*, fuse_file_info* info) {
  return nfs_close(nfs, handle_of(info));
}
int do_unlink(const char* path) {
  return nfs_unlink(nfs, path);
}
int do_rename(const char* from, const char* to, unsigned flags) {
  return flags != 0 ? -EINVAL : nfs_rename(nfs, from, to);
}
int do_link(const char* from, const char* to) {
  return nfs_link(nfs, from, to);
}
int do_mkdir(const char* path, mode_t mode) {
  return nfs_mkdir2(nfs, path, static_cast<int>(mode));
}
int do_rmdir(const char* path) {
  return nfs_rmdir(nfs, path);
}
int do_statfs(const char* path, struct statvfs* status) {
  return nfs_statvfs(nfs, path, status);
}
int do_fsyncdir(const char*, int, fuse_file_info*) {
  return 0;
}

void* do_init(fuse_conn_info*, fuse_config* config) {
  config->use_ino = 1;
  config->entry_timeout = cache_seconds;
  config->attr_timeout = cache_seconds;
  config->negative_timeout = cache_seconds;
  // open() requests the attributes, and drops cached pages that contradict them. NFS guarantees this.
  config->auto_cache = 1;
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "nfs_mount SERVER EXPORT MOUNTPOINT CACHE_SECONDS\n");
    return 2;
  }
  cache_seconds = std::atof(argv[4]);
  nfs = nfs_init_context();
  const std::string url = std::string("nfs://") + argv[1] + argv[2] + "/?version=3";
  nfs_url* parsed = nfs_parse_url_dir(nfs, url.c_str());
  if (parsed == nullptr || nfs_mount(nfs, parsed->server, parsed->path) != 0) {
    std::fprintf(stderr, "nfs_mount: %s: %s\n", url.c_str(), nfs_get_error(nfs));
    return 1;
  }
  fuse_operations operations{};
  operations.getattr = do_getattr;
  operations.readdir = do_readdir;
  operations.open = do_open;
  operations.create = do_create;
  operations.read = do_read;
  operations.write = do_write;
  operations.truncate = do_truncate;
  operations.fsync = do_fsync;
  operations.release = do_release;
  operations.unlink = do_unlink;
  operations.rename = do_rename;
  operations.link = do_link;
  operations.mkdir = do_mkdir;
  operations.rmdir = do_rmdir;
  operations.statfs = do_statfs;
  operations.fsyncdir = do_fsyncdir;
  operations.init = do_init;
  char* arguments[] = {argv[0], argv[3], const_cast<char*>("-f"), const_cast<char*>("-s")};
  return fuse_main(4, arguments, &operations, nullptr);
}
