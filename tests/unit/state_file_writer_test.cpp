// SPDX-License-Identifier: Apache-2.0
// State files that are written piece by piece, incompletely, or with errors.

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <thread>

#include "tests/support/failing_call.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

TEST_CASE("invalid options are refused, and create no file") {
  const TemporaryDirectory work;
  const auto refused = [&](const StateFileOptions& options, std::string_view words) {
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { write_state_file(work / "f", {}, one(), options); }), words));
  };
  refused({.zstd_level = 0}, "level 0");
  refused({.zstd_level = 23}, "level 23");
  refused({.zstd_level = 1, .chunk_bytes = 0}, "64 MiB");
  refused({.zstd_level = 1, .chunk_bytes = (64 << 20) + 1}, "64 MiB");
  refused({.info = {.rank = 1}}, "rank 1 is out of range for size 1");
  refused({.info = {.rank = -1}}, "rank -1");
  refused({.info = {.world_size = 0}}, "for size 0");
  refused({.temporary = "elsewhere/growing"}, "in another directory");
  const std::vector<NamedTensor> deep = {{"deep", pattern(DType::u8, Shape(33, 1), 1)}};
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { write_state_file(work / "f", {}, deep); }), "33 dimensions"));
  const Config with_tensor = one()[0].second;
  CHECK_THROWS_AS(write_state_file(work / "f", with_tensor, {}), Error);
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] {
                       StateFileWriter(work / "f", {}, {{"huge", DType::f64, {std::int64_t{1} << 59}}, {"b"}});
                     }),
            "huge"));
  words_of(ErrorKind::not_found, [&] { write_state_file(work / "no/such/folder", {}, one()); });
  CHECK(work.count() == 0);
}

TEST_CASE("pieces in any order, from several threads") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = {{"a", pattern(DType::bf16, {1000, 321}, 1)},
                                        {"b", normal_weights({64, 64, 16}, 2)}};
  for (const bool compressed : {false, true}) {
    CAPTURE(compressed);
    StateFileOptions options;
    if (compressed) options.zstd_level = 1;
    if (compressed) options.chunk_bytes = 64'200;  // 100 rows of tensor a
    const auto write = [&](const std::string& name, const auto& pieces) {
      StateFileWriter writer(work / name, {}, entries_of(all), options);
      pieces(writer);
      writer.commit();
      CHECK(holds(StateFile::open(work / name), all));
      CHECK(StateFile::open(work / name).check().empty());
    };
    const auto rows = all[0].second.bytes();
    write("ascending", [&](StateFileWriter& writer) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto bytes = all[i].second.bytes();
        for (std::size_t at = 0; at < bytes.size(); at += 7777)
          writer.write(i, at, bytes.subspan(at, std::min<std::size_t>(7777, bytes.size() - at)));
      }
    });
    // Pieces end at the borders of chunks. The checksums are computed from bytes read back.
    write("descending", [&](StateFileWriter& writer) {
      for (std::size_t at = rows.size(); at > 0; at -= 64'200)
        writer.write(0, at - 64'200, rows.subspan(at - 64'200, 64'200));
      writer.write(1, all[1].second);
    });
    write("threads", [&](StateFileWriter& writer) {
      std::vector<std::jthread> threads;
      for (std::size_t t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
          for (std::size_t chunk = t; chunk < 10; chunk += 4)
            writer.write(0, chunk * 64'200, rows.subspan(chunk * 64'200, 64'200));
          if (t == 0) writer.write(1, all[1].second);
        });
    });
    if (!compressed) CHECK(read_text(work / "threads") == read_text(work / "ascending"));
    if (compressed) {
      StateFileWriter writer(work / "refused", {}, entries_of(all), options);
      const auto bytes = all[0].second.bytes();
      writer.write(0, 64'200, bytes.subspan(64'200, 1000));
      CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write(0, 0, bytes.first(1000)); }), "ascending"));
      CHECK(
          has(words_of(ErrorKind::invalid_argument, [&] { writer.write(0, 66'000, bytes.first(1000)); }), "ascending"));
    }
  }
  CHECK(work.count() == 3);
}

TEST_CASE("a failed writer accepts no more data, and leaves no file") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = one({300, 300});
  const std::vector<TensorView> views{all[0].second};
  struct rlimit ordinary {};
  ::getrlimit(RLIMIT_FSIZE, &ordinary);
  const auto refused = [&](StateFileWriter& writer) {
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { writer.write(0, views[0]); }, [&] { writer.write_all(views); }, [&] { writer.commit(); }})
      CHECK(has(words_of(ErrorKind::invalid_argument, call), "Begin again with a new writer"));
  };
  for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)})
    for (const bool at_once : {false, true}) {
      StateFileWriter writer(work / "file", {}, entries_of(all), {.zstd_level = level, .chunk_bytes = 20'000});
      const struct rlimit small { 100'000, ordinary.rlim_max };
      ::setrlimit(RLIMIT_FSIZE, &small);
      words_of(ErrorKind::out_of_space, [&] { at_once ? writer.write_all(views) : writer.write(0, views[0]); });
      ::setrlimit(RLIMIT_FSIZE, &ordinary);
      refused(writer);
    }
  // Renaming to a directory fails.
  StateFileWriter writer(work / "file", {}, entries_of(all));
  fs::create_directory(work / "file");
  writer.write_all(views);
  words_of(ErrorKind::io, [&] { writer.commit(); });
  fs::remove(work / "file");
  refused(writer);
  CHECK(work.count() == 1);
  { const StateFileWriter gone = std::move(writer); }
  CHECK(work.count() == 0);
}

TEST_CASE("small tensors are written together, as many as are in one block of the file") {
  const TemporaryDirectory work;
  std::vector<NamedTensor> all;
  for (int i = 0; i < 300; ++i) all.emplace_back("t" + std::to_string(i), pattern(DType::u8, {20'000}, i));
  const FailingCall writes({.call = "pwrite"});
  write_state_file(work / "file", {}, all);
  CHECK(FailingCall::seen() < 20);
  CHECK(holds(StateFile::open(work / "file"), all));
}

TEST_CASE("bytes that other processes write") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = {{"theirs", pattern(DType::f32, {300, 300}, 1)},
                                        {"ours", pattern(DType::u8, {1000}, 2)},
                                        {"none", pattern(DType::u8, {0}, 3)}};
  StateFileWriter writer(work / "file", {}, entries_of(all), {.temporary = "growing"});
  CHECK(writer.temporary_path() == work / "growing");
  CHECK(fs::exists(work / "growing"));
  const int fd = ::open(writer.temporary_path().c_str(), O_WRONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  const auto bytes = all[0].second.bytes();
  CHECK(::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(writer.file_offset(0).value())) ==
        static_cast<ssize_t>(bytes.size()));
  ::close(fd);
  writer.mark_written(0);
  writer.write(1, all[1].second);
  CHECK_THROWS_AS(writer.mark_written(1), Error);
  writer.mark_written(2);
  writer.commit();
  CHECK(holds(StateFile::open(work / "file"), all));
  CHECK(StateFile::open(work / "file").check().empty());
  CHECK(work.count() == 1);
  StateFileWriter compressed(work / "file", {}, entries_of(all), {.zstd_level = 1});
  CHECK_FALSE(compressed.file_offset(0).has_value());
  CHECK_THROWS_AS(compressed.mark_written(0), Error);
  CHECK(compressed.file_offset(1).has_value());  // too small to be compressed
}

TEST_CASE("a writer that does not commit keeps the existing file") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> before = one();
  const std::vector<NamedTensor> after = one({100, 100}, 4);
  write_state_file(work / "file", {}, before);
  {
    StateFileWriter writer(work / "file", {}, entries_of(after));
    writer.write_all(std::vector<TensorView>{after[0].second});
    CHECK(holds(StateFile::open(work / "file"), before));
  }
  {
    StateFileWriter writer(work / "file", {}, entries_of(after));
    writer.write(0, 0, after[0].second.bytes().first(100));
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.commit(); }), "100 of its 40000 bytes"));
  }
  CHECK(holds(StateFile::open(work / "file"), before));
  CHECK(work.count() == 1);
  const StateFile old = StateFile::open(work / "file");
  const Tensor kept = old.tensor(0);
  write_state_file(work / "file", {}, after);
  CHECK(holds(StateFile::open(work / "file"), after));
  // A process that has the earlier file open can still read it.
  CHECK(bitwise_equal(kept, before[0].second));
  CHECK(holds(old, before));
}

TEST_CASE("wrong use of a writer is reported") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = one();
  StateFileWriter first(work / "file", {}, entries_of(all));
  StateFileWriter writer = std::move(first);
  const auto bytes = all[0].second.bytes();
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write(1, 0, bytes); }), "index 1 is out of range"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write(0, 1, bytes); }), "out of range for its"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write(0, ~0ULL, bytes); }), "out of range for its"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write(0, pattern(DType::f32, {10}, 1)); }),
            "F32 [100, 100]"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write_all({}); }), "1 tensors were announced"));
  writer.write(0, all[0].second);
  writer.commit();
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.commit(); }), "already finished"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { writer.write(0, 0, bytes); }), "already finished"));
  CHECK(has(words_of(ErrorKind::io, [&] { StateFileWriter(work / "x", {}, {}, {.temporary = work / "file"}); }),
            "EEXIST"));
  CHECK(holds(StateFile::open(work / "file"), all));
}
