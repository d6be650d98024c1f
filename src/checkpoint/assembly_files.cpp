// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly_files.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <utility>

#include "muster/error.hpp"
#include "src/os/directory.hpp"
#include "src/os/publish.hpp"

namespace muster {

FileTarget grow_file(const std::string& directory, const FilePlan& file) {
  FileTarget target{directory + "/" + file.name, {}};
  target.place = os::partial_name(target.name);
  os::WritableFile growing = os::WritableFile::create(target.place, target.name);
  growing.reserve(file.bytes);
  growing.close();
  return target;
}

void finish_file(const FilePlan& file, const FileTarget& target) {
  os::WritableFile growing = os::WritableFile::open(target.place, target.name);
  growing.write_at(0, std::as_bytes(std::span(file.header)));
  growing.sync();
  growing.close();
  os::rename_to_new(target.place, target.name);
}

AssemblyFiles::AssemblyFiles(std::span<const FileTarget> targets, const ProcessWork& work, int process,
                             const WrittenCallback& on_written, std::function<void(std::uint32_t)> on_stage)
    : targets_(targets), on_written_(on_written), on_stage_(std::move(on_stage)), files_(targets.size()) {
  for (const Step& step : work.steps) {
    if (step.kind == StepKind::hash || static_cast<int>(step.writer) != process) continue;
    if (step.file >= files_.size()) throw Error(ErrorKind::corrupt, "the work of a process is garbled");
    ++files_[step.file].steps_left;
  }
  raise_stage();
}

void AssemblyFiles::write(const Step& step, std::span<const std::byte> bytes) {
  const auto target = file(step.file);
  target->write_at(step.offset, bytes);
  // The disk works while the next bytes are copied, and nothing piles up for the sync at the end.
  target->start_writeback(step.offset, bytes.size());
  if (!on_written_) return;
  const std::uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
  const std::lock_guard lock(mutex_);
  files_[step.file].parts.push_back({step.offset, bytes.size(), hash});
}

void AssemblyFiles::done_with(const Step& step) {
  std::shared_ptr<os::WritableFile> last;
  std::vector<WrittenPart> parts;
  {
    const std::lock_guard lock(mutex_);
    File& file = files_[step.file];
    if (file.steps_left > 1) {
      --file.steps_left;
      return;
    }
    last = std::move(file.file);
    parts = std::move(file.parts);
  }
  last->sync();
  last->close();
  if (on_written_) on_written_(step.file, parts);
  const std::lock_guard lock(mutex_);
  files_[step.file].steps_left = 0;
  raise_stage();
}

std::shared_ptr<os::WritableFile> AssemblyFiles::file(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  File& file = files_.at(number);
  if (!file.file)
    file.file =
        std::make_shared<os::WritableFile>(os::WritableFile::open(targets_[number].place, targets_[number].name));
  return file.file;
}

void AssemblyFiles::raise_stage() {
  const std::uint32_t before = stage_;
  while (stage_ < files_.size() && files_[stage_].steps_left == 0) ++stage_;
  if (stage_ != before) on_stage_(stage_);
}

}  // namespace muster
