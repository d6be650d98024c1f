// SPDX-License-Identifier: Apache-2.0
// muster doctor: checks whether this machine, and a workspace, meet Muster's requirements, and prints remedies.

#include <fmt/format.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "src/cuda/device_state.hpp"
#include "src/os/directory.hpp"
#include "src/os/library.hpp"
#include "src/os/machine.hpp"
#include "src/os/process.hpp"
#include "src/os/shared_memory.hpp"
#include "src/rendezvous/world.hpp"
#include "src/statefile/writer_state.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/survey.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

using namespace inspect;

enum class CheckStatus : std::uint8_t {
  good,
  note,     ///< missing, but not always needed
  warning,  ///< slower, or a possible problem
  bad,      ///< something will not work
};

struct CheckResult {
  std::string name;  ///< "memory", "memfd"
  CheckStatus health = CheckStatus::good;
  std::string value;        ///< what was found
  std::string remedy = {};  ///< an instruction for the user

  void judge(CheckStatus found, std::string advice) {
    health = found;
    remedy = std::move(advice);
  }
};

constexpr std::uint64_t little = std::uint64_t{1} << 30;  // bytes of memory or of a disk
constexpr std::uint64_t few_files = 1024;

CheckResult memory() {
  const os::MemoryFacts facts = os::memory_facts();
  const os::MemoryHeadroom room = os::memory_headroom(os::Backing::anonymous);
  CheckResult finding{
      "memory", CheckStatus::good,
      fmt::format("{} available of {}", human_bytes(facts.available_bytes), human_bytes(facts.total_bytes))};
  if (room.limit == os::MemoryLimit::cgroup)
    finding.value += fmt::format("; the control group allows {} more", human_bytes(room.bytes));
  if (room.bytes < little)
    finding.judge(CheckStatus::warning, room.limit == os::MemoryLimit::cgroup
                                            ? "give the container or the job a higher memory limit"
                                            : "end other programs, or use a smaller memory budget");
  return finding;
}

CheckResult memfd() {
  try {
    os::create_shared_memory(4096, os::Backing::anonymous);
    return {"memfd", CheckStatus::good, "available: shared memory does not depend on /dev/shm"};
  } catch (const Error& error) {
    return {"memfd", CheckStatus::warning, error.what(),
            "allow memfd_create in the seccomp profile of the container; without it Muster uses /dev/shm"};
  }
}

CheckResult posix_memory() {
  const auto space = os::space_facts("/dev/shm");
  if (!space)
    return {"/dev/shm", CheckStatus::note, "does not exist",
            "mount a tmpfs at /dev/shm if memfd is not allowed (MUSTER_SHM=posix)"};
  CheckResult finding{"/dev/shm", CheckStatus::good,
                      fmt::format("{} free of {}", human_bytes(space->free_bytes), human_bytes(space->total_bytes))};
  if (space->free_bytes < little)
    finding.judge(CheckStatus::note,
                  "enlarge it (docker run --shm-size) if you set MUSTER_SHM=posix, or if other libraries use it");
  return finding;
}

CheckResult limits() {
  const os::ResourceLimits limits = os::resource_limits();
  const auto text = [](const std::optional<std::uint64_t>& limit) {
    return limit ? fmt::to_string(*limit) : std::string("unlimited");
  };
  CheckResult finding{"limits", CheckStatus::good,
                      fmt::format("{} open files, files of {} bytes, address space of {} bytes",
                                  text(limits.open_files), text(limits.file_bytes), text(limits.address_space))};
  if (limits.open_files && *limits.open_files < few_files)
    finding.judge(CheckStatus::warning, "raise the number of open files: ulimit -n 4096");
  if (limits.file_bytes || limits.address_space)
    finding.judge(CheckStatus::warning,
                  "remove the limits, which large tensors exceed: ulimit -f unlimited; ulimit -v unlimited");
  return finding;
}

CheckResult processes() {
  const int namespaces = os::process_namespaces();
  if (namespaces <= 1)
    return {"processes", CheckStatus::good,
            namespaces == 1 ? "in the process namespace of the machine" : "unknown process namespace"};
  return {"processes", CheckStatus::note, fmt::format("in a container: {} process namespaces deep", namespaces),
          "run all ranks of a host in one container, or share the network namespace; run muster gc in the container of "
          "the writers"};
}

CheckResult pidfd() {
  if (os::has_pidfd())
    return {"pidfd", CheckStatus::good, "available: the death of a rank is detected within a second"};
  return {"pidfd", CheckStatus::bad, "not available",
          "use Linux 5.3 or newer, and a seccomp profile that allows pidfd_open"};
}

CheckResult seccomp() {
  if (os::has_seccomp())
    return {"seccomp", CheckStatus::good,
            "available: HDF5 files not written by Muster are read in a sandboxed process"};
  return {"seccomp", CheckStatus::warning, "not available",
          "read only HDF5 files that you trust: without seccomp they are read under resource limits, not in a sandbox"};
}

CheckResult job() {
  std::string set;
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                           "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MUSTER_JOB", "MUSTER_WORKSPACE"})
    if (const auto value = os::environment(name)) set += fmt::format("{}{}={}", set.empty() ? "" : " ", name, *value);
  if (set.empty())
    return {"job", CheckStatus::good, "not a rank of a job: the variables of muster run and torchrun are not set"};
  const bool has_rank = os::environment("RANK").has_value();
  const bool has_size = os::environment("WORLD_SIZE").has_value();
  const bool has_key =
      os::environment("MUSTER_JOB") || (os::environment("MASTER_ADDR") && os::environment("MASTER_PORT"));
  CheckResult finding{"job", CheckStatus::good, printable(set)};
  if (has_rank != has_size) {
    finding.judge(CheckStatus::bad, "set both RANK and WORLD_SIZE, or neither");
  } else if (has_rank && !has_key && os::environment("WORLD_SIZE") != "1")
    finding.judge(CheckStatus::bad,
                  "start ranks with muster run or torchrun, or set MUSTER_JOB to the same random text on all of them");
  return finding;
}

/// Returns the path of a program that the shell would find; empty if there is none.
std::string program_in_path(const std::string& name) {
  const std::string path = os::environment("PATH").value_or("");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    std::error_code error;
    const std::filesystem::path file = std::filesystem::path(path.substr(begin, end - begin)) / name;
    if (std::filesystem::is_regular_file(file, error)) return file.string();
    begin = end + 1;
  }
  return {};
}

/// Returns the finding about a library of Muster that is not loaded, which not all programs need.
CheckResult unloaded(const char* name, const os::LoadedLibrary& library, const std::string& remedy) {
  if (!library.exists)
    return {name, CheckStatus::note,
            fmt::format("{} was not found", std::filesystem::path(library.file).filename().string()), remedy};
  return {name, CheckStatus::warning,
          fmt::format("{} cannot be loaded: {}", in_quotes(library.file), escaped(library.failure)),
          "install the library that this message names, or install Muster again"};
}

CheckResult mpi() {
  group::Start start;
  std::string contradiction;
  try {
    start = group::find_start(group::own_surroundings());
  } catch (const Error& error) {
    contradiction = error.what();
  }
  CheckResult finding{"MPI", CheckStatus::good, {}};
  try {
    finding.value = "libmuster-mpi with " + group::require_mpi().describe();
  } catch (const Error& error) {
    const std::string remedy =
        "install it (Debian: mpich) if mpiexec starts your ranks; otherwise use TCP or a workspace";
    // A wheel has the code over MPI, and only MPI itself is missing.
    if (start.by != group::StartedBy::mpi && group::mpi_support() != nullptr)
      return {"MPI", CheckStatus::note, escaped(error.what()), remedy};
    if (start.by != group::StartedBy::mpi)
      return unloaded("MPI", os::load_library(fmt::format("libmuster-mpi.so.{}", version())), remedy);
    return {"MPI", CheckStatus::bad, fmt::format("{}; {}", start.said, error.what()), remedy};
  }
  const std::string launcher = program_in_path("mpiexec");
  finding.value += launcher.empty() ? "; mpiexec is not in PATH" : "; " + launcher;
  if (!contradiction.empty()) {
    finding.health = CheckStatus::bad;
    finding.value += "; " + contradiction;
    finding.remedy = "unset the variables of the launcher that did not start this process";
  } else if (start.by == group::StartedBy::mpi) {
    finding.value += "; this process is a rank of an MPI job: " + start.said;
  } else if (start.by == group::StartedBy::slurm && start.is_apart && !os::environment("MUSTER_WORKSPACE")) {
    finding.health = CheckStatus::bad;
    finding.value += fmt::format("; started by srun without PMI: {}", start.said);
    finding.remedy =
        "pass srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI; srun --mpi=list shows the supported ones), or set "
        "MUSTER_WORKSPACE to a directory that all hosts see";
  } else {
    finding.value += "; this process was not started by MPI";
  }
  finding.value = escaped(finding.value);
  return finding;
}

CheckResult hdf5() {
  try {
    statefile::require_hdf5();
    return {"HDF5", CheckStatus::good,
            fmt::format("libmuster-hdf5 {} can be loaded: state files can be written", version())};
  } catch (const Error& error) {
    return {"HDF5", CheckStatus::bad, error.what(),
            "install libmuster-hdf5 and libhdf5 to write state files; reading them works"};
  }
}

CheckResult hdf5_reader() {
  const std::string program = hdf5_reader_program();
  if (!program.empty()) return {"HDF5 reader", CheckStatus::good, printable(program)};
  return {"HDF5 reader", CheckStatus::warning, "muster-hdf5-reader was not found",
          "install it, or set MUSTER_HDF5_READER to its path, to read HDF5 files not written by Muster"};
}

CheckResult hdf5_plugin() {
  const auto path = os::environment("HDF5_PLUGIN_PATH");
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path.value_or("/usr/local/hdf5/lib/plugin"), error), end;
       !error && entry != end; entry.increment(error))
    if (entry->path().filename().string().find("zstd") != std::string::npos)
      return {"HDF5 plugin", CheckStatus::good, printable(entry->path().string())};
  return {
      "HDF5 plugin", CheckStatus::note, path ? "HDF5_PLUGIN_PATH has no zstd filter" : "HDF5_PLUGIN_PATH is not set",
      "set it to the folder of the Python package hdf5plugin if other tools read compressed states; Muster does not "
      "need it"};
}

CheckResult devices() {
  const os::LoadedLibrary library = os::load_library(fmt::format("libmuster-cuda.so.{}", version()));
  if (library.handle == nullptr)
    return unloaded("CUDA", library,
                    "install it next to libmuster to gather tensors on GPUs, or copy them to host memory first");
  void* const symbol = os::find_symbol(library, cuda::report_symbol);
  if (symbol == nullptr)
    return {"CUDA", CheckStatus::warning, fmt::format("{} belongs to another build of Muster", in_quotes(library.file)),
            "install the libmuster-cuda of this Muster"};
  CudaReport report;
  if (!reinterpret_cast<cuda::MakeReport>(symbol)(report))
    return {"CUDA", CheckStatus::warning, "the driver does not respond", report.unavailable_reason};
  if (!report.unavailable_reason.empty()) return {"CUDA", CheckStatus::note, "no devices", report.unavailable_reason};
  std::string value = fmt::format("driver for CUDA {}", report.driver);
  for (const std::string& device : report.devices) value += "; " + device;
  if (!report.nccl.empty()) return {"CUDA", CheckStatus::good, fmt::format("{}; NCCL {}", value, report.nccl)};
  return {"CUDA", CheckStatus::good, fmt::format("{}; no NCCL", value),
          fmt::format("tensors between GPUs of several hosts are copied through host memory: {}",
                      report.nccl_unavailable_reason)};
}

struct Look {
  std::string_view word;
  Colour colour;
};

Look look_of(CheckStatus health) {
  constexpr std::array<Look, 4> looks = {
      {{"ok", Colour::good}, {"note", Colour::faint}, {"warning", Colour::warning}, {"bad", Colour::bad}}};
  return looks[static_cast<std::size_t>(health)];
}

/// Appends text; if a width is given, lines are wrapped at it and continue at `indent`.
void append_wrapped(std::string& out, const std::string& text, std::size_t indent, std::size_t width) {
  constexpr std::size_t least = 20;
  std::size_t column = indent;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const std::size_t length = columns(word);
    if (begin != 0) {
      if (width >= indent + least && column + 1 + length > width) {
        out += "\n" + std::string(indent, ' ');
        column = indent;
      } else {
        out += ' ';
        ++column;
      }
    }
    out += word;
    column += length;
    begin = end + 1;
  }
  out += '\n';
}

CheckResult contents(const std::string& path) {
  try {
    const workspace::Survey survey = workspace::survey(path, {.open_states = false});
    CheckResult finding{"workspace", CheckStatus::good,
                        fmt::format("{}: {}, {}, {}", printable(path), counted(survey.jobs.size(), "job"),
                                    counted(survey.files, "file"), human_bytes(survey.bytes))};
    if (survey.jobs.size() > 1)
      finding.judge(CheckStatus::note,
                    "several jobs share this workspace: use one directory per job, or pass --job-id");
    const auto dead = std::count_if(survey.temporary.begin(), survey.temporary.end(),
                                    [](const workspace::SurveyEntry& entry) { return entry.writer == os::Life::dead; });
    if (dead != 0)
      finding.judge(CheckStatus::note, fmt::format("delete {} of ended processes: muster gc --yes",
                                                   counted(static_cast<std::uint64_t>(dead), "file")));
    return finding;
  } catch (const Error& error) {
    return {"workspace", CheckStatus::bad, error.what(), "pass a directory that all ranks see"};
  }
}

CheckResult mount(const std::string& path) {
  CheckResult finding{"file system", CheckStatus::good, {}};
  try {
    const os::FileSystem system = os::file_system_of(path);
    finding.value = system.type;
    if (system.type.starts_with("0x"))
      finding.value += ", unknown: treated as a network file system; files are read, not mapped";
    else if (system.is_network)
      finding.value += ", a network file system: files are read, not mapped";
  } catch (const Error& error) {
    return {"file system", CheckStatus::bad, error.what(), "check the mount"};
  }
  const auto facts = os::mount_facts(path);
  if (!facts) return finding;
  finding.value += fmt::format("; {} on {} ({})", printable(facts->source), printable(facts->point), facts->options);
  const auto has = [&](std::string_view option) {
    const std::string list = "," + facts->options + ",";
    return list.find("," + std::string(option) + ",") != std::string::npos;
  };
  if (has("ro")) {
    finding.judge(CheckStatus::bad, "mount it writable: ranks cannot write their states");
  } else if (has("soft")) {
    finding.judge(CheckStatus::warning,
                  "mount it hard: with a soft mount a slow server causes errors in the middle of a file");
  } else if (has("nolock") || has("local_lock=all") || has("local_lock=flock")) {
    finding.judge(CheckStatus::note, "nothing to do: locks are local to this host, and no state depends on them");
  } else if (facts->type.starts_with("fuse"))
    finding.judge(CheckStatus::note,
                  "nothing to do: FUSE hides the file system, so Muster treats it as a network file system");
  return finding;
}

CheckResult space(const std::string& path) {
  const auto facts = os::space_facts(path);
  if (!facts) return {"space", CheckStatus::bad, "unknown", "check the mount"};
  CheckResult finding{"space", CheckStatus::good,
                      fmt::format("{} free of {}", human_bytes(facts->free_bytes), human_bytes(facts->total_bytes))};
  if (facts->total_files != 0) finding.value += fmt::format(", {} more files", facts->free_files);
  if (facts->free_bytes < little || (facts->total_files != 0 && facts->free_files < 1000))
    finding.judge(CheckStatus::warning,
                  "free space (muster gc): a state is as large as its tensors, and two steps are kept");
  return finding;
}

/// Makes a file and removes it, to test write access and to read the server's clock.
std::vector<CheckResult> probe(const std::string& path) {
  using Clock = std::chrono::system_clock;
  try {
    const Clock::time_point before = Clock::now();
    const std::optional<os::FileStatus> status = workspace::probe(path);
    const Clock::time_point after = Clock::now();
    if (!status)
      return {{"writing", CheckStatus::bad, "a new file is missing after it was written", "check the mount"}};
    // Clocks of file systems have a resolution of some ms, so a file may be older than the call that made it.
    constexpr auto tick = std::chrono::milliseconds(20);
    std::chrono::duration<double> skew{0};
    if (status->changed > after) skew = status->changed - after;
    if (status->changed + tick < before) skew = status->changed - before;
    CheckResult clock{"clock", CheckStatus::good,
                      fmt::format("the clock of the server differs by {:+.2f} s from this host", skew.count())};
    if (std::abs(skew.count()) > 2)
      clock.judge(CheckStatus::warning,
                  "synchronize the clocks (NTP): the ages in muster ls are wrong by this difference");
    return {{"writing", CheckStatus::good, "a file can be created and deleted"}, std::move(clock)};
  } catch (const Error& error) {
    return {{"writing", CheckStatus::bad, error.what(), "give this user write permission"}};
  }
}

CheckResult locks(const std::string& path) {
  try {
    if (os::try_lock(os::open_directory(path))) return {"locks", CheckStatus::good, "flock works"};
  } catch (const Error& error) {
    return {"locks", CheckStatus::note, error.what(), "nothing to do: no state depends on locks"};
  }
  return {"locks", CheckStatus::note, "flock does not work, or another process holds the lock",
          "nothing to do: no state depends on locks"};
}

std::vector<CheckResult> examine_machine() {
  std::vector<CheckResult> findings = {
      {"muster", CheckStatus::good, std::string(version())},
      {"system", CheckStatus::good,
       fmt::format("{}, {}", os::kernel_name(), counted(static_cast<std::uint64_t>(os::usable_cores()), "core"))}};
  for (CheckResult (*examine)() : {memory, memfd, posix_memory, limits, processes, pidfd, seccomp, job, mpi, devices,
                                   hdf5, hdf5_reader, hdf5_plugin})
    findings.push_back(examine());
  findings.push_back({"zstd", CheckStatus::good, ZSTD_versionString()});
  return findings;
}

/// Returns one line per finding, with its remedy below it.
std::string findings_text(const std::vector<CheckResult>& findings, const OutputStyle& style) {
  constexpr std::size_t state_width = 7;
  constexpr std::size_t gap = 2;
  std::size_t name_width = 0;
  for (const CheckResult& finding : findings) name_width = std::max(name_width, finding.name.size());
  const std::size_t indent = state_width + gap + name_width + gap;
  std::string out;
  for (const CheckResult& finding : findings) {
    const auto [word, colour] = look_of(finding.health);
    out += coloured(style, colour, word) + std::string(state_width + gap - word.size(), ' ');
    out += finding.name + std::string(name_width + gap - finding.name.size(), ' ');
    append_wrapped(out, finding.value, indent, style.width);
    if (finding.remedy.empty()) continue;
    out += std::string(indent, ' ');
    append_wrapped(out, "-> " + finding.remedy, indent, style.width);
  }
  return out;
}

/// {"healthy", "checks": [{"name", "state", "value", "remedy"}]}.
Config findings_tree(const std::vector<CheckResult>& findings, bool is_healthy) {
  const auto tree = [](const CheckResult& finding) {
    return Config::object({{"name", finding.name},
                           {"state", look_of(finding.health).word},
                           {"value", finding.value},
                           {"remedy", or_null(finding.remedy)}});
  };
  return Config::object({{"healthy", is_healthy}, {"checks", list_of(findings, tree)}});
}

/// Examines an existing or future workspace directory: makes a probe in it and removes it.
void examine_workspace(const std::string& path, std::vector<CheckResult>& findings) {
  findings.push_back(contents(path));
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return;
  findings.push_back(mount(path));
  findings.push_back(space(path));
  for (CheckResult& finding : probe(path)) findings.push_back(std::move(finding));
  findings.push_back(locks(path));
}

struct DoctorArguments {
  std::string workspace;
  bool json = false;
};

int examine(const DoctorArguments& arguments) {
  std::vector<CheckResult> findings = examine_machine();
  if (!arguments.workspace.empty()) examine_workspace(arguments.workspace, findings);
  const bool is_healthy = std::ranges::count(findings, CheckStatus::bad, &CheckResult::health) == 0;
  print(arguments.json ? json_report(findings_tree(findings, is_healthy)) : findings_text(findings, output_style()));
  return is_healthy ? 0 : 1;
}

}  // namespace

void add_doctor_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("doctor", "Check this machine, and optionally a workspace, and print remedies");
  auto arguments = std::make_shared<DoctorArguments>();
  command->add_option("workspace", arguments->workspace, "A directory that ranks share, or will share")
      ->type_name("WORKSPACE");
  add_json_flag(*command, arguments->json);
  command->footer(
      "ok: works. note: missing, but not everything needs it. warning: slower, or a possible problem. bad: something\n"
      "will not work. Writes a small file into the workspace, and deletes it.\n"
      "Exit status: 0 nothing is bad; 1 something is bad.\n\n"
      "Examples:\n  muster doctor\n  muster run -n 1 -- muster doctor /shared/workspace");
  command->callback([arguments, &status] { status = examine(*arguments); });
}

}  // namespace muster::tools
