// SPDX-License-Identifier: Apache-2.0
// safetensors files: round trips, and failures that must not change the existing file.

#include "muster/safetensors.hpp"

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "tests/support/failing_call.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

TensorEntry entry_of(std::string name, DType dtype, Shape shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
}

void write_all(const std::string& path, const std::vector<TensorEntry>& specs,
               const std::map<std::string, std::string>& metadata = {}) {
  SafetensorsWriter writer(path, specs, metadata);
  for (std::size_t i = 0; i < specs.size(); ++i)
    writer.write(specs[i].name, pattern(specs[i].dtype, specs[i].shape, i));
  writer.commit();
}

void check_all(const std::string& path, const std::vector<TensorEntry>& specs) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  REQUIRE(file.tensors().size() == specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    INFO(specs[i].name);
    const Tensor tensor = file.tensor(specs[i].name);
    CHECK(bitwise_equal(tensor, pattern(specs[i].dtype, specs[i].shape, i)));
    CHECK_FALSE(tensor.is_writable());
    const std::size_t size = itemsize(specs[i].dtype);
    if (size != 0 && tensor.nbytes() != 0) CHECK(reinterpret_cast<std::uintptr_t>(tensor.data()) % size == 0);
  }
}

}  // namespace

TEST_CASE("every dtype is restored, with scalars, empty tensors and odd numbers of packed elements") {
  const TemporaryDirectory directory;
  std::vector<TensorEntry> specs;
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    specs.push_back(entry_of(name + ".matrix", dtype, {3, 4}));
    specs.push_back(entry_of(name + ".odd", dtype, {3, 5}));
    specs.push_back(entry_of(name + ".scalar", dtype, {}));
    specs.push_back(entry_of(name + ".empty", dtype, {0, 7}));
  }
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"who\"\n", "\\ \u00e9 \x01"}};
  const std::string path = directory / "all.safetensors";
  write_all(path, specs, metadata);
  check_all(path, specs);
  CHECK(SafetensorsFile::open(path).metadata() == metadata);
  CHECK(directory.count() == 1);
}

TEST_CASE("the header has the form that the format requires") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  write_all(path, {entry_of("b", DType::u8, {3}), entry_of("a", DType::f32, {1}), entry_of("c", DType::u4, {3})},
            {{"k", "v"}});
  const std::string bytes = read_text(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  CHECK(bytes.size() == 8 + length + 4 + 3 + 2);
  const std::string expected = R"({"__metadata__":{"k":"v","muster.dtype.c":"U4 [3]"},)"
                               R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                               R"("b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)"
                               R"("c":{"dtype":"U8","shape":[2],"data_offsets":[7,9]}})";
  std::string header = bytes.substr(8, length);
  CHECK(header.substr(0, expected.size()) == expected);
  CHECK(header.find_first_not_of(' ', expected.size()) == std::string::npos);
}

TEST_CASE("a file without tensors, and names of all kinds") {
  const TemporaryDirectory directory;
  write_all(directory / "none.safetensors", {});
  CHECK(SafetensorsFile::open(directory / "none.safetensors").tensors().empty());
  const std::vector<TensorEntry> specs = {entry_of("", DType::u8, {1}),
                                          entry_of("a/b", DType::u8, {2}),
                                          entry_of("\u00fc\U0001f600", DType::u8, {3}),
                                          entry_of("new\nline \"quoted\" \\", DType::u8, {4}),
                                          entry_of("muster.dtype.x", DType::i4, {5}),
                                          entry_of(std::string("nul\0nul", 7), DType::u8, {6})};
  write_all(directory / "names.safetensors", specs);
  check_all(directory / "names.safetensors", specs);
}

TEST_CASE("10,000 tensors, looked up by name") {
  const TemporaryDirectory directory;
  std::vector<TensorEntry> specs;
  for (int i = 0; i < 10'000; ++i) specs.push_back(entry_of(fmt::format("layers.{}.weight", i), DType::bf16, {4, 2}));
  const std::string path = directory / "many.safetensors";
  write_all(path, specs);
  check_all(path, specs);
}

TEST_CASE("pieces from threads, in any order") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  const std::vector<TensorEntry> specs = {entry_of("x", DType::f32, {1000, 33}), entry_of("y", DType::u8, {777'777})};
  SafetensorsWriter writer(path, specs);
  const std::array<Tensor, 2> tensors = {pattern(DType::f32, {1000, 33}, 0), pattern(DType::u8, {777'777}, 1)};
  constexpr std::size_t piece = 5003;
  std::vector<std::thread> threads;
  for (std::size_t worker = 0; worker < 4; ++worker) {
    threads.emplace_back([&, worker] {
      for (std::size_t which : {0U, 1U}) {
        const std::span<const std::byte> bytes = tensors[which].bytes();
        const std::size_t pieces = (bytes.size() + piece - 1) / piece;
        for (std::size_t i = pieces; i-- > 0;) {
          if (i % 4 != worker) continue;
          writer.write(specs[which].name, i * piece,
                       bytes.subspan(i * piece, std::min(piece, bytes.size() - i * piece)));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  writer.commit();
  check_all(path, specs);
}

TEST_CASE("a strided tensor, and tensors that outlive their file") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  const Tensor matrix = pattern(DType::i16, {5, 3}, 4);
  SafetensorsWriter writer(path, {entry_of("t", DType::i16, {3, 5})});
  writer.write("t", matrix.view().transposed());
  writer.commit();
  Tensor read;
  {
    const SafetensorsFile file = SafetensorsFile::open(path);
    const SafetensorsFile copy = file;
    read = copy.tensor(std::size_t{0});
  }
  CHECK(bitwise_equal(read, matrix.view().transposed()));
  CHECK_THROWS_AS(static_cast<void>(read.mutable_data()), Error);
}

TEST_CASE("the writer refuses invalid calls") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  const auto refuse = [&](std::vector<TensorEntry> specs, std::map<std::string, std::string> metadata = {}) {
    return words_of(ErrorKind::invalid_argument,
                    [&] { SafetensorsWriter(path, std::move(specs), std::move(metadata)); });
  };
  CHECK(has(refuse({entry_of("a", DType::u8, {1}), entry_of("a", DType::u8, {1})}),
            "tensor \"a\": the name is duplicated"));
  CHECK(has(refuse({entry_of("a", DType::u8, {1}), entry_of("a", DType::f32, {1})}),
            "tensor \"a\": the name is duplicated"));
  CHECK(has(refuse({entry_of("__metadata__", DType::u8, {1})}), "reserved for metadata"));
  CHECK(has(refuse({entry_of("\xff", DType::u8, {1})}), "not UTF-8"));
  CHECK(has(refuse({}, {{"k", "\xc0\x80"}}), "not UTF-8"));
  CHECK(has(refuse({entry_of("a", DType::u8, {-1})}), "negative"));
  CHECK(has(refuse({entry_of("a", DType::u8, {INT64_MAX})}), "tensor \"a\""));
  std::vector<TensorEntry> huge;
  for (int i = 0; i < 9; ++i) huge.push_back(entry_of(std::to_string(i), DType::u8, {INT64_MAX / 8 - 1}));
  CHECK(has(refuse(huge), "more bytes than a file can have"));
  CHECK(
      has(refuse({}, {{"k", std::string(max_safetensors_header, 'x')}}),
          "Divide the tensors among more files: a smaller --max-shard-size, or more pipeline stages or expert ranks"));

  SafetensorsWriter writer(path, {entry_of("a", DType::u8, {4}), entry_of("b", DType::u8, {2})});
  const std::array<std::byte, 8> bytes{};
  CHECK(has(words_of(ErrorKind::not_found, [&] { writer.write("c", 0, bytes); }), "\"c\": it was not announced"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write("a", 0, bytes); }),
            "are out of range for its 4 bytes"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write("a", UINT64_MAX, std::span(bytes).first(2)); }),
            "out of range"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write("a", pattern(DType::i8, {4}, 0)); }),
            "expected U8 [4] as announced, received I8 [4]"));
  writer.write("a", 0, std::span(bytes).first(4));
  writer.write("b", 0, std::span(bytes).first(1));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.commit(); }),
            "tensor \"b\": 1 of its 2 bytes were written"));
  CHECK(directory.count() == 1);
  writer.write("b", 1, std::span(bytes).first(1));
  writer.commit();
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.commit(); }), "already finished"));
  CHECK(SafetensorsFile::open(path).tensors().size() == 2);
}

TEST_CASE("without commit no file remains") {
  const TemporaryDirectory directory;
  {
    SafetensorsWriter writer(directory / "a.safetensors", {entry_of("a", DType::u8, {4})});
    SafetensorsWriter moved = std::move(writer);
    moved.write("a", pattern(DType::u8, {4}, 0));
    CHECK(directory.count() == 1);
  }
  CHECK(directory.count() == 0);
  const std::string words =
      words_of(ErrorKind::not_found, [&] { SafetensorsWriter(directory / "no/a.safetensors", {}); });
  CHECK(has(words, "no/a.safetensors"));
}

TEST_CASE("files that cannot be opened") {
  const TemporaryDirectory directory;
  CHECK(has(words_of(ErrorKind::not_found, [&] { SafetensorsFile::open(directory / "none"); }),
            "none\": opening: does not exist"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { SafetensorsFile::open(directory.path().string()); }),
            "a directory"));
  write_all(directory / "a", {entry_of("a", DType::u8, {4})});
  const SafetensorsFile file = SafetensorsFile::open(directory / "a");
  CHECK(
      has(words_of(ErrorKind::not_found, [&] { static_cast<void>(file.tensor("b")); }), "tensor \"b\" does not exist"));
  CHECK(has(words_of(ErrorKind::not_found, [&] { static_cast<void>(file.tensor(1)); }), "1 tensors"));
}

TEST_CASE("every failed call leaves the earlier file and no other") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  write_all(path, {entry_of("old", DType::u8, {4})});
  const std::string before = read_text(path);
  struct Case {
    const char* call;
    int error;
    int after;
    ErrorKind kind;
  };
  const std::array cases = {
      Case{"create", EACCES, 0, ErrorKind::io},
      Case{"fallocate", ENOSPC, 0, ErrorKind::out_of_space},
      Case{"fallocate", EIO, 0, ErrorKind::io},
      Case{"pwrite", ENOSPC, 0, ErrorKind::out_of_space},
      Case{"pwrite", EIO, 1, ErrorKind::io},
      Case{"pwrite", EDQUOT, 2, ErrorKind::out_of_space},
      Case{"fsync", EIO, 0, ErrorKind::io},
      Case{"close", EIO, 0, ErrorKind::io},
      Case{"close", ENOSPC, 0, ErrorKind::out_of_space},
      Case{"rename", EIO, 0, ErrorKind::io},
  };
  for (const Case& each : cases) {
    INFO(each.call << " " << each.error);
    const FailingCall fault({.call = each.call, .error = each.error, .after = each.after, .times = 1});
    const std::string words = words_of(each.kind, [&] {
      write_all(path, {entry_of("new", DType::u8, {4}), entry_of("new2", DType::u8, {4})});
    });
    CHECK(has(words, path));
    CHECK(read_text(path) == before);
    CHECK(directory.count() == 1);
  }
  {
    const FailingCall fault({.call = "fallocate", .error = ENOSPC, .times = 1});
    CHECK(has(words_of(ErrorKind::out_of_space, [&] { SafetensorsWriter(path, {entry_of("a", DType::u8, {4})}); }),
              "free): No space left"));
  }
  // This failure only means that a power failure may undo the rename.
  {
    const FailingCall fault({.call = "fsync-directory", .error = EIO, .times = 1});
    words_of(ErrorKind::io, [&] { write_all(path, {entry_of("new", DType::u8, {4})}); });
    CHECK(SafetensorsFile::open(path).find("new"));
  }
  CHECK(directory.count() == 1);
}

TEST_CASE("short and interrupted writes, and file systems that cannot reserve space, are not failures") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  const std::vector<TensorEntry> specs = {entry_of("a", DType::f64, {1001})};
  for (const auto& [call, error] : {std::pair("pwrite", os::short_transfer), std::pair("pwrite", EINTR),
                                    std::pair("fallocate", EOPNOTSUPP), std::pair("fallocate", EINTR)}) {
    INFO(call << " " << error);
    const FailingCall fault({.call = call, .error = error, .times = 1});
    write_all(path, specs);
    check_all(path, specs);
  }
  for (const char* call : {"open", "fstat", "mmap"}) {
    INFO(call);
    const FailingCall fault({.call = call, .error = EIO, .times = 1});
    CHECK(has(words_of(ErrorKind::io, [&] { SafetensorsFile::open(path); }), path));
  }
}

TEST_CASE("a device, a pipe or a link is not replaced by a file") {
  const TemporaryDirectory directory;
  write_text(directory / "target", "");
  std::filesystem::create_symlink("target", directory / "link.safetensors");
  REQUIRE(::mkfifo((directory / "pipe.safetensors").c_str(), 0600) == 0);
  for (const auto& [name, what] :
       {std::pair("link.safetensors", "a link"), std::pair("pipe.safetensors", "a device or a pipe")})
    CHECK(has(
        words_of(ErrorKind::invalid_argument, [&] { write_all(directory / name, {entry_of("a", DType::u8, {4})}); }),
        what));
  CHECK(directory.count() == 3);
}

TEST_CASE("a file whose file system is not known to be local is read, not mapped: truncation is an error") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  const std::vector<TensorEntry> specs = {entry_of("a", DType::u8, {100'000}), entry_of("b", DType::f32, {3})};
  write_all(path, specs);
  CHECK(SafetensorsFile::open(path).is_mapped());
  const FailingCall fault({.call = "statfs", .error = EIO, .times = 1});
  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK_FALSE(file.is_mapped());
  check_all(path, specs);
  std::vector<std::byte> part(10);
  file.read(*file.find("a"), 99'990, part);
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { file.read(*file.find("a"), 99'991, part); }),
            "are out of range"));
  std::filesystem::resize_file(path, 5000);
  CHECK(has(words_of(ErrorKind::corrupt, [&] { (void)file.tensor("a"); }), "has it been shortened?"));
}

TEST_CASE("writes that differ from the announced tensors are refused with file and tensor") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.safetensors";
  SafetensorsWriter writer(path, {entry_of("a", DType::u8, {4})}, {});
  const auto words = [&](const auto& work) { return words_of(ErrorKind::invalid_argument, work); };
  const auto names_both = [&](const std::string& text) { return has(text, path) && has(text, "\"a\""); };
  const std::string other = words([&] { writer.write("a", pattern(DType::i8, {4}, 1)); });
  CHECK(has(other, "expected U8 [4] as announced, received I8 [4]"));
  CHECK(names_both(other));
  const std::string beyond = words([&] { writer.write("a", 2, pattern(DType::u8, {3}, 1).bytes()); });
  CHECK(has(beyond, "3 bytes at offset 2 are out of range for its 4 bytes"));
  CHECK(names_both(beyond));
  const std::string missing = words([&] { writer.commit(); });
  CHECK(names_both(missing));
  CHECK_FALSE(std::filesystem::exists(path));
  writer.write("a", pattern(DType::u8, {4}, 1));
  writer.commit();
  CHECK(has(words([&] { writer.commit(); }), "already finished"));
  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(has(words_of(ErrorKind::not_found, [&] { (void)file.tensor(1); }),
            "tensor index 1 is out of range for 1 tensors"));
}
