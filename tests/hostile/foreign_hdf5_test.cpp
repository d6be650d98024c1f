// SPDX-License-Identifier: Apache-2.0
// A gallery of HDF5 files that are malformed, damaged or attack their reader. Each is refused with its own message or
// shown without harm, within limits of memory and time. MUSTER_MAKE_FOREIGN_HDF5 makes them.

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "muster/verify.hpp"
#include "tests/hostile/foreign_look.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;
using namespace muster::test;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Sanitizers need memory for shadow and quarantine, and everything is slower.
constexpr std::uint64_t most_memory = std::uint64_t{1} << 30;
constexpr std::uint64_t most_memory_of_elements = most_memory;
constexpr double most_seconds = 20;
#else
constexpr std::uint64_t most_memory = std::uint64_t{64} << 20;
constexpr std::uint64_t most_memory_of_elements = std::uint64_t{128} << 20;
constexpr double most_seconds = 2.5;
#endif

ForeignHdf5Options usual() {
  ForeignHdf5Options options;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  options.deadline = std::chrono::milliseconds(15000);
#endif
  return options;
}

bool sees(const Look& look, std::string_view part) {
  const bool found =
      std::ranges::any_of(look.lines, [part](const std::string& line) { return line.find(part) != std::string::npos; });
  if (!found) {
    for (const std::string& line : look.lines) MESSAGE(line);
    MESSAGE("has no " << std::string(part));
  }
  return found;
}

struct Exhibit {
  const char* file;
  std::vector<const char*> parts;  ///< all of them must appear in the output
};

const std::vector<Exhibit> gallery = {
    {"external_link.h5", {"issue link: a link to another file, \"/etc/passwd : /x\": not followed", "tensor good"}},
    {"soft_cycle.h5", {"issue a: a soft link to \"/b\": not followed", "issue b: a soft link to \"/a\""}},
    {"hard_cycle.h5",
     {"issue g/up: another name of the group at the root", "issue g/self: another name of the group \"g\""}},
    {"hard_cycle_new.h5", {"issue g/up: another name of the group", "issue g/self: another name of the group"}},
    {"deep.h5", {"more than 32 groups deep: not listed"}},
    {"names.h5",
     {"tensor ..", "tensor %2e%2e%2fetc%2fpasswd", "tensor a\\nb", "tensor \\x1b]0;owned\\x07\\x1b[2J",
      "tensor \\u009b31m", "tensor \\u202egnp.exe", "issue \\\\xff\\\\xfe: its name is not UTF-8", "tensor $(reboot)",
      "issue soft: a soft link to \"/\\x1b[31m\"", "a name of 60000 bytes", "text @title"}},
    {"many_links.h5", {"issue l19999: a soft link"}},
    {"external_storage.h5", {"issue stolen: its elements are in another file, which is not opened"}},
    {"virtual.h5", {"issue stolen: a virtual dataset"}},
    {"chunk_bomb.h5", {"issue bomb: it claims 1099511627776 bytes, more than 1024 times the"}},
    {"one_chunk_bomb.h5", {"issue bomb: its chunks have 67108864 bytes, more than 8 times the"}},
    {"dense_bomb.h5", {"tensor bomb", "unreadable bomb: ", "libhdf5 cannot read it: "}},
    {"short_chunks.h5",
     {"unreadable deflated: ", "libhdf5 cannot read it: ", "unreadable shuffled: ",
      "the length of a chunk is not the expected one"}},
    {"endless_bomb.h5", {"tensor bomb", "tensor \"bomb\": ", "libhdf5 cannot read it: "}},
    {"huge_chunk.h5", {"issue huge: its chunks have 2147483648 bytes, and the limit is 67108864"}},
    {"tiny_chunks.h5", {"issue tiny: it is in 17179869184 chunks, and the limit per file is 1048576"}},
    {"elements.h5",
     {"issue exa: it claims 1152921504606846976 bytes", "issue overflow: not a tensor: it claims more elements",
      "issue chunks: it is in 1099511627776 chunks", "tensor empty"}},
    {"filters.h5",
     {"issue twice: compressed more than once", "issue many: a corrupted dataset: it has too many filters",
      "issue unknown: compressed with the filter 60000"}},
    {"texts.h5",
     {"issue : more than 1000 attributes", "issue megabytes: a text that is too long",
      "issue thousands: a text that is too long", "text few"}},
    {"overlap.h5", {"tensor a", "issue b: a corrupted dataset: its bytes overlap those of \"a\""}},
    {"truncated_half.h5", {"error corrupt: ", "listing: libhdf5 cannot open the file: truncated file"}},
    {"truncated_last_byte.h5", {"error corrupt: ", "truncated file"}},
    {"truncated_superblock.h5", {"error corrupt: ", "truncated file"}},
    {"signature_only.h5", {"error corrupt: ", "libhdf5 cannot open the file"}},
    {"signature_and_garbage.h5", {"error corrupt: ", "libhdf5 cannot open the file: bad superblock version number"}},
    {"signature_and_ones.h5", {"error corrupt: ", "libhdf5 cannot open the file"}},
    {"signature_and_zeros.h5", {"error corrupt: ", "libhdf5 cannot open the file"}},
    {"header_garbage.h5", {"error corrupt: ", "libhdf5 cannot open the file"}},
    {"damaged_TREE.h5", {"issue : a corrupted group"}},
    {"damaged_SNOD.h5", {"issue : a corrupted group"}},
    {"damaged_HEAP.h5", {"issue : a corrupted group"}},
    {"damaged_GCOL.h5", {"issue a: an attribute or text that cannot be read: unit: "}},
    {"empty.h5", {"error corrupt: ", "not an HDF5 file: the signature is missing"}},
    {"text.h5", {"error corrupt: ", "not an HDF5 file: the signature is missing"}},
    {"zip.h5", {"error corrupt: ", "not an HDF5 file: the signature is missing"}},
};

/// Files that MUSTER_MAKE_FOREIGN_HDF5 makes.
void make(std::string_view what, const TemporaryDirectory& folder) {
  const char* maker = std::getenv("MUSTER_MAKE_FOREIGN_HDF5");
  REQUIRE_MESSAGE(maker != nullptr, "MUSTER_MAKE_FOREIGN_HDF5 names the program that makes the files");
  const std::string command = fmt::format("'{}' {} '{}'", maker, what, folder.path().string());
  REQUIRE(std::system(command.c_str()) == 0);  // NOLINT(bugprone-command-processor)
}

class Gallery {
 public:
  Gallery() { make("gallery", folder_); }
  std::string operator/(std::string_view name) const { return folder_ / name; }
  [[nodiscard]] const std::filesystem::path& path() const { return folder_.path(); }

 private:
  TemporaryDirectory folder_;
};

/// Made once per process.
const Gallery& gallery_files() {
  static const Gallery files;
  return files;
}

/// Checks for the elements that the maker wrote: 0, 1, 2 ... 999, 0 ...
template <class Element>
bool counts(const ForeignHdf5& file, std::string_view name, DType dtype, const Shape& shape) {
  const std::optional<std::size_t> found = file.find(name);
  if (!found) return false;
  const TensorEntry& tensor = file.tensors()[*found];
  if (tensor.dtype != dtype || tensor.shape != shape) return false;
  bool is_same = true;
  // Pieces with arbitrary ends.
  constexpr std::uint64_t piece = 24;
  std::vector<std::byte> memory;
  for (std::uint64_t at = 0; at < tensor.bytes; at += piece) {
    const auto part = file.read_piece(*found, at, std::min(piece, tensor.bytes - at), memory);
    for (std::size_t i = 0; i < part.size() / sizeof(Element); ++i) {
      Element value{};
      std::memcpy(&value, part.data() + i * sizeof(Element), sizeof(Element));
      is_same = is_same && value == static_cast<Element>((at / sizeof(Element) + i) % 1000);
    }
  }
  return is_same;
}

TEST_CASE("valid files of every version of the format are read") {
  const TemporaryDirectory folder;
  make("samples", folder);
  for (const char* name : {"old.h5", "v18.h5", "v110.h5"}) {
    CAPTURE(std::string(name));
    const auto file = ForeignHdf5::open(folder / name);
    CHECK(counts<float>(*file, "layers/0/weight", DType::f32, {16, 8}));
    CHECK(counts<double>(*file, "layers/0/bias", DType::f64, {16}));
    CHECK(counts<std::int16_t>(*file, "layers/1/weight", DType::i16, {40, 30}));
    CHECK(counts<float>(*file, "layers/1/bias", DType::f32, {9, 5, 6}));
    // The dataset has two names, and is listed by the first one in the file.
    CHECK(counts<std::uint8_t>(*file, file->find("hard") ? "hard" : "compact", DType::u8, {12}));
    if (std::string_view(name) == "v110.h5") CHECK(counts<std::uint16_t>(*file, "edges", DType::u16, {10, 11}));
    CHECK(file->find("boolean").has_value());
    CHECK(file->find("complex").has_value());
    CHECK(file->find("many/t39").has_value());
    CHECK(file->metadata().at("@format") == "pt");
    CHECK(file->metadata().at("names") == R"(["one", "two", "three"])");
    CHECK(file->metadata().at("layers/0/weight@note7") == "some words");
    const std::optional<std::size_t> weight = file->find("layers/1/weight");
    std::vector<std::byte> memory;
    CHECK(file->detail(*weight).stored_bytes < file->tensors()[*weight].bytes);
    CHECK(words_of(ErrorKind::invalid_argument, [&] { (void)file->read_piece(*weight, 2400, 1, memory); }) != "");
  }
}

/// Checks elements [first, first + count) of a tensor that the maker wrote. Each is its index modulo 1000, or 7 where
/// nothing was written.
bool is_run(const ForeignHdf5& file, std::size_t tensor, std::uint64_t first, std::uint64_t count) {
  const TensorEntry& entry = file.tensors()[tensor];
  const std::uint64_t rows = static_cast<std::uint64_t>(entry.shape[0]);
  const std::uint64_t row = entry.bytes / 2 / rows;
  const std::uint64_t written = entry.name.starts_with("sparse") ? rows / 2 * row : rows * row;
  std::vector<std::byte> memory;
  const auto part = file.read_piece(tensor, 2 * first, 2 * count, memory);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint16_t value = 0;
    std::memcpy(&value, part.data() + 2 * i, 2);
    if (value != (first + i < written ? (first + i) % 1000 : 7)) return false;
  }
  return true;
}

TEST_CASE("data that only a newer libhdf5 reads is not reported as damage") {
  const auto file = ForeignHdf5::open(std::string(MUSTER_TEST_DATA) + "/hdf5/hdf5_2.h5");
  CHECK(counts<float>(*file, "plain", DType::f32, {4, 6}));
  CHECK(counts<float>(*file, "chunked", DType::f32, {4, 6}));
  // A libhdf5 that is new enough reads all of them.
  CHECK(file->tensors().size() + file->omissions().size() == 7);
  for (const Omission& omission : file->omissions()) {
    CAPTURE(omission.name);
    CHECK(has(omission.reason, "in a newer format than libhdf5 "));
    CHECK(has(omission.reason, "write the file again"));
    CHECK(omission.reason.find("corrupted") == std::string::npos);
    CHECK(omission.is_lost);
  }
}

TEST_CASE("ranges of elements in chunks of any shape, through every filter pipeline") {
  const TemporaryDirectory folder;
  make("chunks", folder);
  std::mt19937 random(5);
  for (const char* name : {"old.h5", "new.h5", "growing.h5"}) {
    const auto file = ForeignHdf5::open(folder / name);
    CHECK(file->omissions().empty());
    CHECK(file->tensors().size() == (std::string_view(name) == "growing.h5" ? 1 : 10 * 7));
    for (std::size_t i = 0; i < file->tensors().size(); ++i) {
      const TensorEntry& tensor = file->tensors()[i];
      CAPTURE(tensor.name);
      const std::uint64_t elements = tensor.bytes / 2;
      bool is_same = is_run(*file, i, 0, elements);
      for (std::uint64_t begin = 0; begin < elements; begin += 1 + random() % (2 + elements / 16))
        is_same = is_same && is_run(*file, i, begin, 1 + random() % (elements - begin));
      CHECK(is_same);
    }
  }
}

TEST_CASE("a damaged chunk is reported; the chunks beside it can be read") {
  const TemporaryDirectory folder;
  make("chunks", folder);
  const auto file = ForeignHdf5::open(folder / "damaged.h5");
  std::vector<std::byte> memory;
  const std::string words =
      words_of(ErrorKind::corrupt, [&] { (void)file->read_piece(*file->find("sums"), 0, 2 * 64, memory); });
  CHECK(has(words, "tensor \"sums\": "));
  CHECK(has(words, "libhdf5 cannot read it: data error detected by Fletcher32 checksum"));
  CHECK(is_run(*file, *file->find("sums"), 0, 32));
  CHECK(is_run(*file, *file->find("sums"), 48, 16));
  CHECK(has(words_of(ErrorKind::corrupt, [&] { (void)file->read_piece(*file->find("zstd"), 0, 2 * 64, memory); }),
            "cannot read it"));
  CHECK(is_run(*file, *file->find("zstd"), 0, 16));
}

TEST_CASE("threads read at once, and longer than one process may") {
  const TemporaryDirectory folder;
  make("chunks", folder);
  // A reader that gives each process one second of CPU time.
  const std::string reader = folder / "reader";
  write_text(reader, fmt::format("#!/bin/sh\n[ $2 = list ] || set -- 1 $2 $3\nexec '{}' \"$@\"\n",
                                 std::getenv("MUSTER_HDF5_READER")));
  std::filesystem::permissions(reader, std::filesystem::perms::owner_all);
  const auto file = ForeignHdf5::open(folder / "new.h5", {.deadline = std::chrono::seconds(20), .reader = reader});
  const auto taken_by_ended = [] {
    rusage used{};
    ::getrusage(RUSAGE_CHILDREN, &used);
    return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  };
  const double enough = taken_by_ended() + 0.8;
  const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  std::atomic<bool> is_same = true;
  // Reads different tensors in turn, so that no chunk is cached.
  const auto read_on = [&](const char* a, const char* b) {
    while (is_same && taken_by_ended() < enough && std::chrono::steady_clock::now() < latest)
      is_same = is_run(*file, *file->find(a), 17, 199'000) && is_run(*file, *file->find(b), 17, 199'000);
  };
  std::thread other(read_on, "sparse 500x400 in 100x100", "sums first, deflate 500x400 in 100x100");
  read_on("shuffle deflate 500x400 in 100x100", "deflate, sums last 500x400 in 100x100");
  other.join();
  CHECK(is_same);
  CHECK(taken_by_ended() >= enough);
}

TEST_CASE("each file of the gallery is refused or shown, with its message, in little memory and time") {
  const Gallery& files = gallery_files();
  std::size_t made = 0;
  for (const auto& entry : std::filesystem::directory_iterator(files.path())) {
    const std::string name = entry.path().filename();
    const bool is_known =
        std::any_of(gallery.begin(), gallery.end(), [&name](const Exhibit& exhibit) { return name == exhibit.file; });
    CHECK_MESSAGE(is_known, name);
    ++made;
  }
  CHECK(made == gallery.size());
  double slowest = 0;
  std::uint64_t largest = 0;
  for (const Exhibit& exhibit : gallery) {
    CAPTURE(exhibit.file);
    const Look seen = look_from_outside(files / exhibit.file, usual());
    CHECK(seen.end.empty());
    CHECK(seen.seconds < most_seconds);
    CHECK(seen.peak_bytes < most_memory_of_elements);
    for (const char* part : exhibit.parts) CHECK(sees(seen, part));
    CHECK(std::ranges::none_of(seen.lines, [](const std::string& line) { return line.starts_with("broken"); }));
    for (const std::string& line : seen.lines) {
      const bool is_plain = std::all_of(line.begin(), line.end(),
                                        [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; });
      CHECK_MESSAGE(is_plain, printable(line));
    }
    slowest = std::max(slowest, seen.seconds);
    largest = std::max(largest, seen.peak_bytes);
  }
  MESSAGE(fmt::format("{} files; the slowest took {:.3f} s, the largest look {:.1f} MiB", gallery.size(), slowest,
                      static_cast<double>(largest) / (1 << 20)));
}

TEST_CASE("the reader itself uses little memory") {
  const Gallery& files = gallery_files();
  for (const Exhibit& exhibit : gallery) {
    CAPTURE(exhibit.file);
    try {
      ForeignHdf5Options options;
      options.deadline = std::chrono::milliseconds(static_cast<int>(most_seconds * 1000));
      const auto file = ForeignHdf5::open(files / exhibit.file, options);
      CHECK(file->cost().reader_peak_bytes < most_memory);
    } catch (const Error&) {
      // The test above checks the message.
    }
  }
}

TEST_CASE("a reader that is missing, not a program, silent, or of another build is reported with the cause") {
  const Gallery& files = gallery_files();
  const std::string good = files / "soft_cycle.h5";
  const auto open_with = [&good](const std::string& reader) {
    ForeignHdf5Options options;
    options.reader = reader;
    options.deadline = std::chrono::milliseconds(300);
    (void)ForeignHdf5::open(good, options);
  };
  const std::string reader = std::getenv("MUSTER_HDF5_READER");
  ::setenv("MUSTER_HDF5_READER", "/nowhere", 1);
  CHECK(has(words_of(ErrorKind::unsupported, [&] { (void)verify(good); }), "starting the program"));
  ::setenv("MUSTER_HDF5_READER", reader.c_str(), 1);
  const VerifyReport report = verify(files / "truncated_half.h5");
  REQUIRE(report.problems.size() == 1);
  CHECK(report.problems[0].defect == Defect::file);
  const TemporaryDirectory scripts;
  const TemporaryDirectory samples;
  make("samples", samples);
  const auto script = [&scripts](std::string_view name, std::string_view text) {
    const std::string path = scripts / name;
    write_text(path, fmt::format("#!/bin/sh\n{}\n", text));
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  };
  CHECK(has(words_of(ErrorKind::unsupported, [&] { open_with(files / "nowhere"); }), "starting the program"));
  CHECK(has(words_of(ErrorKind::unsupported, [&] { open_with(good); }), "starting the program"));
  CHECK(has(words_of(ErrorKind::unsupported, [&] { open_with(script("fails", "exit 127")); }),
            "does not start (it ended early (exit status 127))"));
  CHECK(has(words_of(ErrorKind::timeout, [&] { open_with(script("sleeps", "exec sleep 100")); }),
            "within 300 ms of CPU time"));
  // The real reader lists the file.
  const auto read_with = [&](std::string_view name, std::string_view text) {
    ForeignHdf5Options options;
    options.reader = script(name, fmt::format("[ $2 = list ] && exec '{}' \"$@\"\n{}", reader, text));
    options.deadline = std::chrono::milliseconds(300);
    std::vector<std::byte> memory;
    (void)ForeignHdf5::open(samples / "old.h5", options)->read_piece(0, 0, 1, memory);
  };
  CHECK(has(words_of(ErrorKind::corrupt, [&] { read_with("dies", "kill -SEGV $$"); }),
            "libhdf5 cannot process the file: it crashed (SIGSEGV)"));
  CHECK(
      has(words_of(ErrorKind::timeout, [&] { read_with("waits", "exec sleep 100"); }), "libhdf5 did not read 1 bytes"));
  CHECK(has(
      words_of(ErrorKind::corrupt, [&] { read_with("refuses", "printf '\\006\\0\\0\\0\\0\\0\\0\\0\\033[2Jhi' >&4"); }),
      "tensor \"boolean\": \\x1b[2Jhi"));
  CHECK(has(words_of(ErrorKind::version, [&] { open_with(script("other", "printf 'MUSTER-HDF5-1\\n...' >&4")); }),
            "different builds"));
  CHECK(has(words_of(ErrorKind::corrupt,
                     [&] { open_with(script("crashes", "printf 'MUSTER-HDF5-3\\n\\001\\007' >&4; kill -SEGV $$")); }),
            "it crashed (SIGSEGV)"));
  CHECK(has(words_of(ErrorKind::corrupt, [&] { open_with(script("lies", "printf 'MUSTER-HDF5-3\\n\\377' >&4")); }),
            "contradicts its format"));
  CHECK(has(words_of(ErrorKind::corrupt,
                     [&] { open_with(script("talks", "while :; do printf 'MUSTER-HDF5-3\\n\\001\\007' ; done >&4")); }),
            "contradicts its format"));
}

TEST_CASE("paths that are not regular files") {
  const Gallery& files = gallery_files();
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)ForeignHdf5::open(files.path()); }), "a directory"));
  CHECK(has(words_of(ErrorKind::not_found, [&] { (void)ForeignHdf5::open(files / "nothing.h5"); }), "opening"));
  CHECK(
      has(words_of(ErrorKind::invalid_argument, [&] { (void)ForeignHdf5::open("/dev/null"); }), "not a regular file"));
  CHECK(is_hdf5_file(files / "soft_cycle.h5"));
  CHECK_FALSE(is_hdf5_file(files / "text.h5"));
}

}  // namespace
