// SPDX-License-Identifier: Apache-2.0
// A gallery of torch.save files that are malformed, truncated or would run programs. Each is refused with its own
// message. Muster never runs anything in a pickle, so the test only checks that each file is refused or read.

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <zstd.h>

#include <algorithm>
#include <ctime>

#include "bench/counted_heap.hpp"
#include "muster/verify.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/checkpoint/thirdparty/dcp.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/torch_files.hpp"

using namespace muster;
using namespace muster::test;
using namespace muster::test::pickled;

namespace {

struct HostileFile {
  std::string name;
  std::string bytes;
  std::string words;
};

const std::string eight(32, 'x');  // eight floats

std::string zip_of(const std::string& pickle, const std::string& storage = eight) {
  return make_zip(torch_parts(pickle, {{"0", storage}}));
}
/// One tensor "w", with the entries of `more`.
std::string zip_of_tensor(const std::string& tensor_node) {
  return zip_of(whole(dict({{"w", tensor_node}})));
}
std::string good_pickle() {
  return whole(dict({{"w", tensor("0", "FloatStorage", 8, 0, {2, 4}, {4, 1})}}));
}
std::string good() {
  return zip_of(good_pickle());
}
/// The valid file with changed parts.
template <class Change>
std::string changed(Change&& change) {
  std::vector<ZipPart> parts = torch_parts(good_pickle(), {{"0", eight}});
  change(parts);
  return make_zip(parts);
}
std::string with_call(std::string_view module, std::string_view name) {
  return zip_of(whole(dict({{"w", call(global(module, name), tuple(text("echo")))}})));
}
std::string deep_dicts(int depth) {
  std::string out = tensor("0", "FloatStorage", 8, 0, {8}, {1});
  for (int i = 0; i < depth; ++i) out = dict({{"d", out}});
  return out;
}
std::string deep_lists(int depth) {
  const auto count = static_cast<std::size_t>(depth);
  return std::string(count, ']') + tensor("0", "FloatStorage", 8, 0, {8}, {1}) + std::string(count, 'a');
}

std::vector<HostileFile> pickles() {
  const auto of = [](const std::string& node) { return zip_of(whole(node)); };
  return {
      {"os.system", with_call("os", "system"),
       "the pickle refers to os.system, which can run programs: refused, and nothing was run"},
      {"posix.system", with_call("posix", "system"), "refers to posix.system"},
      {"builtins.eval", with_call("builtins", "eval"), "refers to builtins.eval"},
      {"builtins of Python 2", with_call("__builtin__", "exec"), "refers to __builtin__.exec"},
      {"a module below", with_call("importlib.util", "find_spec"), "refers to importlib.util.find_spec"},
      {"subprocess", with_call("subprocess", "Popen"), "refers to subprocess.Popen"},
      {"pip", with_call("pip", "main"), "refers to pip.main"},
      {"a name with dots", zip_of("\x80\x04" + text("torch") + text("os.system") + "\x93."),
       "which could evade the check of names"},
      {"names by numbers", zip_of("\x80\x04K\x01K\x02\x93."), "the pickle refers to a name that is not text"},
      {"INST", zip_of(whole("(ios\nsystem\n")), "the opcode 0x69 at byte 3"},
      {"OBJ", zip_of(whole("(" + global("a", "b") + "o")), "the opcode 0x6f at byte 8"},
      {"EXT1", zip_of(whole(std::string("\x82\x01"))), "the opcode 0x82 at byte 2"},
      {"protocol 0", zip_of("(dp0\n."), "not a pickle of protocol 2 to 5"},
      {"protocol 9", zip_of("\x80\x09N."), "not a pickle of protocol 2 to 5"},
      {"LONG4", zip_of(whole(std::string("\x8b\xff\xff\xff\x7f", 5))), "truncated within a number"},
      {"empty", zip_of(""), "the pickle is truncated"},
      {"no stop", zip_of("\x80\x02}"), "truncated within an opcode"},
      {"after the stop", zip_of(good_pickle() + "cos\nsystem\n(tR."), "bytes follow the end"},
      {"two objects", zip_of(whole("NN")), "the pickle does not end with exactly one object"},
      {"nothing on the stack", zip_of(whole("0")), "the pickle pops from an empty stack"},
      {"no mark", zip_of(whole("t")), "the stack has no mark"},
      {"below a mark", zip_of(whole("}(0")), "the pickle pops from an empty stack"},
      {"a pair of one", zip_of(whole("K\x01s")), "the pickle pops from an empty stack"},
      {"a pair below a mark", zip_of(whole("}K\x01(K\x02s")), "the pickle pops from an empty stack"},
      {"a text past the end", zip_of(whole("X" + bytes_of(0x7fffffff))), "truncated within a text"},
      {"a text of all ones", zip_of("\x80\x04\x8d" + bytes_of(UINT64_MAX) + "."), "truncated within a text"},
      {"a memo far away", zip_of(whole("Nr" + bytes_of(0x7fffffff))), "large gaps"},
      {"a memo of gaps", zip_of(whole("Nr" + bytes_of(64) + "r" + bytes_of(129))), "large gaps"},
      {"a memo that is counted", zip_of(whole(std::string("Nq\x05\x94h\x01") + "0")), "the file has no tensors"},
      {"an empty memo", zip_of(whole("h\x05")), "the pickle reads a memo entry that does not exist"},
      {"items into a number",
       zip_of(whole("K\x01K\x02"
                    "a")),
       "appends items of a list to a number"},
      {"pairs into a list", zip_of(whole("](K\x01K\x02u")), "appends items of a dict to a list"},
      {"a key alone", zip_of(whole("}(K\x01u")), "a key without a value"},
      {"a state for a number", zip_of(whole("K\x01Nb")), "sets a state on a number"},
      {"arguments that are none", zip_of(whole(global("a", "b") + "K\x01R")),
       "the pickle makes a call whose arguments are not a tuple"},
      {"a key twice", of(dict({{"w", tensor("0", "FloatStorage", 8, 0, {8}, {1})}, {"w", number(1)}})),
       "the duplicate key \"w\""},
      {"a dict in itself", of("}q\x01(" + text("d") + "h\x01u"), "nested too deeply"},
      {"too deep", of(deep_dicts(65)), "nested too deeply"},
      {"lists too deep", of(deep_lists(65)), "nested too deeply"},
      {"a module", of(call(global("torch.nn", "Linear"), tuple())), "a pickled object (\"torch.nn.Linear\")"},
      {"a number", of(number(7)), "the file has no tensors"},
      {"no tensors", of(dict({{"epoch", number(7)}})), "the file has no tensors (keys: \"epoch\")"},
      {"two candidates",
       of(dict({{"model", dict({{"w", tensor("0", "FloatStorage", 8, 0, {8}, {1})}})},
                {"state_dict", dict({{"w", tensor("0", "FloatStorage", 8, 0, {8}, {1})}})}})),
       "Choose one with --key"},
  };
}

std::vector<HostileFile> tensors() {
  const auto of = [](std::int32_t count, std::int32_t offset, const std::vector<std::int32_t>& shape,
                     const std::vector<std::int32_t>& strides, std::string_view type = "FloatStorage") {
    return zip_of_tensor(tensor("0", type, count, offset, shape, strides));
  };
  return {
      {"past its storage", of(8, 0, {3, 4}, {4, 1}), "tensor \"w\": its elements are out of range of its storage"},
      {"an offset past it", of(8, 8, {1}, {1}), "out of range of its storage"},
      {"strides past it", of(8, 0, {2, 2}, {8, 1}), "out of range of its storage"},
      {"strides that overflow", of(8, 0, {0x7fffffff, 0x7fffffff, 4}, {0x7fffffff, 0x7fffffff, 1}),
       "more bytes than 63 bits can count"},
      {"a negative offset", of(8, -1, {1}, {1}), "its offset in the storage is missing"},
      {"a negative stride", of(8, 7, {8}, {-1}), "malformed shape: an extent is not a number from 0"},
      {"a negative extent", of(8, 0, {-1}, {1}), "malformed shape: an extent is not a number from 0"},
      {"a stride too few", of(8, 0, {2, 4}, {1}), "the numbers of strides and dimensions differ"},
      {"expanded far", of(8, 0, {0x7fffffff}, {0}), "made from the 32 bytes of its storage"},
      {"a storage of another size", of(9, 0, {9}, {1}), "has 32 bytes, expected 36"},
      {"a storage that is not there", zip_of_tensor(tensor("7", "FloatStorage", 8, 0, {8}, {1})),
       "\"7\" does not exist"},
      {"complex128", of(2, 0, {2}, {1}, "ComplexDoubleStorage"),
       "unsupported type of storage \"torch.ComplexDoubleStorage\""},
      {"quantised", of(32, 0, {32}, {1}, "QInt8Storage"), "unsupported type of storage \"torch.QInt8Storage\""},
      {"sparse", zip_of_tensor(call(global("torch._utils", "_rebuild_sparse_tensor"), tuple(number(1)))),
       "_rebuild_sparse_tensor\", which Muster cannot read"},
      {"no storage",
       zip_of_tensor(call(global("torch._utils", "_rebuild_tensor_v2"),
                          tuple(number(0), number(0), numbers({1}), numbers({1}), number(0), number(0)))),
       "it has no storage"},
  };
}

/// The valid file with another number at an offset in its zip64 end record (56 bytes), in the locator (20) or in the
/// end record (22).
template <class Number>
std::string with_end(std::size_t place, Number value) {
  std::string bytes = good();
  bytes.replace(bytes.size() - (56 + 20 + 22) + place, sizeof value, bytes_of(value));
  return bytes;
}
/// The valid file whose storage has these sizes in a zip64 field.
std::string with_zip64_field(const std::vector<std::uint64_t>& numbers) {
  return changed([&](auto& parts) {
    parts[2].size = UINT32_MAX;
    for (const std::uint64_t number : numbers) parts[2].extra += bytes_of(number);
    parts[2].extra =
        bytes_of(std::uint16_t{1}) + bytes_of(static_cast<std::uint16_t>(parts[2].extra.size())) + parts[2].extra;
  });
}

std::vector<HostileFile> zip64_lies() {
  constexpr std::uint64_t most = UINT64_MAX;
  return {
      {"another count", with_end(32, std::uint64_t{3}), "malformed zip archive: the two end records differ"},
      {"another directory", with_end(48, std::uint64_t{0}), "malformed zip archive: the two end records differ"},
      {"a directory of another size", with_end(40, std::uint64_t{1} << 40),
       "malformed zip archive: the two end records differ"},
      {"not where it is said", with_end(56 + 8, std::uint64_t{0}),
       "malformed zip archive: the zip64 end record is not at the end"},
      {"past the end", with_end(56 + 8, most), "malformed zip archive: the zip64 end record is not at the end"},
      {"none where it is said", with_end(0, 0x06064b51), "malformed zip archive: the zip64 end record is missing"},
      {"one that is longer", with_end(4, most), "malformed zip archive: the zip64 end record is missing"},
      {"a large entry", with_zip64_field({most, most}), "\"archive/data/0\": it is out of range of the archive"},
      {"an entry of gigabytes", with_zip64_field({std::uint64_t{1} << 40, std::uint64_t{1} << 40}),
       "\"archive/data/0\": it is out of range of the archive"},
      {"two sizes", with_zip64_field({32, 33}), "\"archive/data/0\": it has two sizes"},
      {"one size of two", with_zip64_field({32}), "truncated within an entry"},
      {"an entry elsewhere", changed([](auto& parts) {
         parts[2].place = UINT32_MAX;
         parts[2].extra = bytes_of(std::uint16_t{1}) + bytes_of(std::uint16_t{8}) + bytes_of(most);
       }),
       "\"archive/data/0\": it is out of range of the archive"},
  };
}
/// Counts and sizes that only the zip64 end record has.
std::vector<HostileFile> zip64_counts() {
  const auto of = [](std::size_t place, std::uint64_t value) {
    std::string bytes = with_end(place, value);
    const std::size_t end = bytes.size() - 22;
    bytes.replace(end + 8, 12, std::string(12, '\xff'));
    return bytes;
  };
  return {
      {"many entries", of(32, std::uint64_t{1} << 60), "directory would have 1152921504606846976 entries"},
      {"a large directory", of(40, std::uint64_t{1} << 60), "directory would have 1152921504606846976 bytes"},
      {"a directory past the end", of(48, std::uint64_t{1} << 60),
       "truncated zip archive, or bytes were inserted into it: the directory is not where the end record places it"},
  };
}

/// Files that request much more memory than their length.
std::vector<HostileFile> bombs() {
  std::string gaps = "N";
  for (std::uint32_t i = 0; i < 20'000; ++i) gaps += "r" + bytes_of(i * 2);
  std::string doubled = "N";
  for (int i = 0; i < 200; ++i)
    doubled +=
        "q" + std::string(1, static_cast<char>(i)) + "0h" + static_cast<char>(i) + "h" + static_cast<char>(i) + "\x86";
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "]";
  return {
      {"a memo of gaps in many steps", zip_of(whole(gaps)), "large gaps"},
      {"tuples of the tuple before", zip_of(whole(doubled)), "nested too deeply"},
      {"lists in lists", zip_of(whole(deep + std::string(99'999, 'a'))), "nested too deeply"},
      {"marks", zip_of(whole(std::string(100'000, '('))), "the pickle does not end with exactly one object"},
      {"a list of many", zip_of(whole("](" + std::string(1'000'000, 'N') + "e")), "the file has no tensors"},
  };
}

std::vector<HostileFile> archives() {
  const std::string whole_file = good();
  return {
      {"truncated", whole_file.substr(0, whole_file.size() - 1), "truncated"},
      {"half", whole_file.substr(0, whole_file.size() / 2), "truncated"},
      {"bytes behind it", whole_file + "x",
       "truncated zip archive, or bytes were appended to it: the end record is missing"},
      {"bytes in front", "PK\x03\x04" + whole_file, "malformed zip archive: the zip64 end record is not at the end"},
      {"an entry twice", changed([](auto& parts) { parts.push_back(parts[2]); }),
       "\"archive/data/0\": it is duplicated"},
      {"compressed", changed([](auto& parts) { parts[2].method = 8; }), "is compressed"},
      {"encrypted", changed([](auto& parts) { parts[2].flags = 1; }), "is encrypted"},
      {"unknown flags", changed([](auto& parts) { parts[2].flags = 0x0810; }), "has unknown flags"},
      {"other flags", changed([](auto& parts) { parts[2].local_flags = 1; }),
       "has different flags in its header and in the zip directory"},
      {"it has a different name in its header", changed([](auto& parts) { parts[2].local_name = "archive/data/1"; }),
       "it has a different name in its header"},
      {"a longer name", changed([](auto& parts) { parts[2].local_name = "archive/data/1234"; }),
       "it has a different name in its header"},
      {"overlapping", changed([](auto& parts) {
         parts[3].place = 0;
         parts[3].name = "archive/data.pkm";
       }),
       "overlaps"},
      {"outside", changed([](auto& parts) { parts[2].place = 1 << 20; }), "is out of range of the archive"},
      {"past the directory", changed([](auto& parts) { parts[2].size = 1 << 20; }), "is out of range of the archive"},
      {"another checksum", changed([](auto& parts) { parts[0].crc = 7; }),
       "checksum mismatch (CRC-32): data is corrupted"},
      {"big-endian", changed([](auto& parts) { parts[1].bytes = "big"; }), "big-endian"},
      {"no pickle", changed([](auto& parts) { parts.erase(parts.begin()); }),
       "not a file of torch.save: the zip archive has no data.pkl"},
      {"TorchScript", changed([](auto& parts) {
         parts.push_back({"archive/constants.pkl", "x", 8});
       }),
       "TorchScript"},
      {"two roots", changed([](auto& parts) {
         parts.push_back({"other/version", "3"});
       }),
       "is not below \"archive/\""},
  };
}

// A directory of torch.distributed.checkpoint with one tensor "w" of floats.

struct Part {
  std::vector<std::int32_t> begin;
  std::vector<std::int32_t> extents;
  std::string file = "__0_0.distcp";
  std::int32_t bytes = -1;  ///< number in the metadata; -1: that of the item
  std::string transform = {};
};

std::string made(std::string_view name, const std::vector<std::pair<std::string, std::string>>& state) {
  return call(global("torch.distributed.checkpoint.metadata", name), ")") + dict(state) + "b";
}
std::string size_of(const std::vector<std::int32_t>& extents) {
  return call(global("torch", "Size"), tuple(numbers(extents)));
}

std::string float_properties() {
  return call(global("torch.distributed.checkpoint.metadata", "TensorProperties"), ")") +
         tuple(global("torch", "float32")) + "b";
}

/// Every part has four floats in its own item at the beginning of the file.
std::string metadata_of(const std::vector<std::int32_t>& size, const std::vector<Part>& parts,
                        std::int32_t item_bytes) {
  std::string chunks = "](";
  std::string places = "}(";
  for (const Part& part : parts) {
    chunks += made("ChunkStorageMetadata", {{"offsets", size_of(part.begin)}, {"sizes", size_of(part.extents)}});
    std::vector<std::pair<std::string, std::string>> info = {
        {"relative_path", text(part.file)},
        {"offset", number(0)},
        {"length", number(part.bytes < 0 ? item_bytes : part.bytes)}};
    if (!part.transform.empty()) info.emplace_back("transform_descriptors", tuple(text(part.transform)));
    places += made("MetadataIndex", {{"fqn", text("w")}, {"offset", size_of(part.begin)}}) + made("_StorageInfo", info);
  }
  return whole(made(
      "Metadata",
      {{"state_dict_metadata",
        dict({{"w", made("TensorStorageMetadata",
                         {{"properties", float_properties()}, {"size", size_of(size)}, {"chunks", chunks + "e"}})}})},
       {"storage_data", places + "u"}}));
}

struct HostileSave {
  std::string name;
  std::vector<std::int32_t> size;
  std::vector<Part> parts;
  std::string words = {};
};

std::vector<HostileSave> saves() {
  return {
      {"a good one", {2, 4}, {{{0, 0}, {1, 4}}, {{1, 0}, {1, 4}}}},
      {"a hole", {3, 4}, {{{0, 0}, {1, 4}}, {{2, 0}, {1, 4}}}, "tensor \"w\": 8 of 12 elements are present"},
      {"an overlap",
       {2, 4},
       {{{0, 0}, {1, 4}}, {{0, 1}, {1, 3}}, {{1, 0}, {1, 4}}},
       "[0:1, 0:4] and [0:1, 1:4] overlap"},
      {"a part outside", {1, 4}, {{{1, 0}, {1, 4}}}, "is out of range for [1, 4]"},
      {"a part twice", {1, 4}, {{{0, 0}, {1, 4}}, {{0, 0}, {1, 4}}}, "is stored twice"},
      {"a part of another size", {1, 8}, {{{0, 0}, {1, 8}}}, "expected F32 [1, 8], found F32 [1, 4]"},
      {"a file elsewhere", {1, 4}, {{{0, 0}, {1, 4}, "../__0_0.distcp"}}, "is not in the same directory"},
      {"a file that is gone", {1, 4}, {{{0, 0}, {1, 4}, "__9_0.distcp"}}, "__9_0.distcp"},
      {"an item that is too short", {1, 4}, {{{0, 0}, {1, 4}, "__0_0.distcp", 100}}, "truncated"},
      {"an item past the end", {1, 4}, {{{0, 0}, {1, 4}, "__0_0.distcp", 1 << 30}}, "extends past its end"},
      {"a transformed item",
       {1, 4},
       {{{0, 0}, {1, 4}, "__0_0.distcp", -1, "stream.other/1"}},
       "with \"stream.other/1\""},
      {"an item that is not compressed",
       {1, 4},
       {{{0, 0}, {1, 4}, "__0_0.distcp", -1, "stream.zstd/1"}},
       "not a zstd stream"},
      {"a compressed item", {1, 4}, {{{0, 0}, {1, 4}, "packed.distcp", -1, "stream.zstd/1"}}},
      {"a compressed item that is cut off",
       {1, 4},
       {{{0, 0}, {1, 4}, "packed.distcp", 100, "stream.zstd/1"}},
       "truncated"},
      {"an item that grows",
       {1, 4},
       {{{0, 0}, {1, 4}, "bomb.distcp", -1, "stream.zstd/1"}},
       "more than the expected 1048592 bytes"},
      {"no parts", {1, 4}, {}, "0 of 4 elements are present"},
  };
}

std::string zstd_of(const std::string& bytes) {
  std::string out(ZSTD_compressBound(bytes.size()), ' ');
  out.resize(ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 3));
  return out;
}

/// Returns the item size for the file that has all parts of a save.
std::int32_t item_bytes(const HostileSave& save, const std::string& item, const std::string& packed,
                        const std::string& bomb) {
  const std::string file = save.parts.empty() ? "" : save.parts[0].file;
  return static_cast<std::int32_t>((file == "packed.distcp" ? packed : file == "bomb.distcp" ? bomb : item).size());
}

void check(const std::vector<HostileFile>& files) {
  const TemporaryDirectory folder(Medium::memory);
  const std::string path = folder / "file.pt";
  for (const HostileFile& file : files) {
    CAPTURE(file.name);
    write_text(path, file.bytes);
    std::string words;
    bench::heap_peak();
    const std::uint64_t before = bench::heap_now();
    try {
      std::vector<std::string> notes;
      const auto found = thirdparty::find_checkpoint(path);
      REQUIRE(found.has_value());
      open_checkpoint(*found, 0, {}, notes);
    } catch (const Error& error) {
      words = error.what();
    }
    // The file's length limits the memory, whatever the contents are.
    CHECK(bench::heap_peak() - before < (256 << 10) + 64 * file.bytes.size());
    CHECK(has(words, file.words));
    CHECK(has(words, path));
    CHECK(words.find('\n') == std::string::npos);
  }
}

}  // namespace

TEST_CASE("valid files are read, also with the deepest nesting") {
  const TemporaryDirectory folder(Medium::memory);
  for (const std::string& file : {make_zip(torch_parts(good_pickle(), {{"0", eight}}), false), good(),
                                  zip_of(whole(deep_dicts(64))), zip_of(whole(deep_lists(64)))}) {
    write_text(folder / "file.pt", file);
    std::vector<std::string> notes;
    const auto tensors = open_checkpoint(*thirdparty::find_checkpoint(folder / "file.pt"), 0, {.key = "."}, notes);
    REQUIRE(tensors->tensors().size() == 1);
    std::string bytes(32, ' ');
    tensors->read(0, 0, std::as_writable_bytes(std::span(bytes)));
    CHECK(bytes == eight);
  }
}

TEST_CASE("pickles") {
  check(pickles());
}

TEST_CASE("tensors") {
  check(tensors());
}

TEST_CASE("archives") {
  check(archives());
  check(zip64_lies());
  check(zip64_counts());
}

TEST_CASE("bombs") {
  check(bombs());
}

TEST_CASE("a changed storage is detected by its checksum, and by nothing else") {
  const TemporaryDirectory folder(Medium::memory);
  std::string bytes = good();
  bytes[bytes.find(eight)] = 'y';
  write_text(folder / "file.pt", bytes);
  const VerifyReport report = verify(folder / "file.pt");
  REQUIRE(report.problems.size() == 1);
  CHECK(report.checked == 1);
  CHECK(report.problems[0].defect == Defect::checksum);
  CHECK(has(report.problems[0].message, "tensor \"w\": checksum mismatch: "));
  CHECK(verify(folder / "file.pt", {.checksums = false}).is_good());
}

TEST_CASE("the time to read Megatron metadata is linear in the number of tensors") {
  constexpr int count = 100'000;
  std::string tensors = "}(";
  std::string added = "}(";
  for (int i = 0; i < count; ++i) {
    const std::string name = text(fmt::format("optimizer.state.exp_avg.{:06}", i));
    tensors += name + made("TensorStorageMetadata",
                           {{"properties", float_properties()}, {"size", size_of({0})}, {"chunks", "]"}});
    added += name + dict({{"nd_reformulated_orig_global_shape", numbers({4})}});
  }
  const std::string pickle = whole(
      made("Metadata", {{"state_dict_metadata", tensors + "u"}, {"mcore_data", added + "u"}, {"storage_data", "}"}}));
  thirdparty::DcpMetadata metadata;
  const std::clock_t begin = std::clock();
  metadata.add(std::as_bytes(std::span(pickle)));
  metadata.finish();
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 5);
  REQUIRE(metadata.tensors().size() == count);
  CHECK(std::ranges::all_of(metadata.tensors(), &thirdparty::DcpTensor::is_flattened));
}

TEST_CASE("metadata of two ranks that contradict each other are refused") {
  const auto with = [](const std::string& dtype, std::int32_t rows) {
    std::string pickle = metadata_of({rows, 4}, {}, 0);
    return pickle.replace(pickle.find("float32"), 7, dtype);
  };
  const std::string first = with("float32", 2);
  for (const std::string& other : {with("float64", 2), with("float32", 3)}) {
    thirdparty::DcpMetadata metadata;
    for (int twice = 0; twice < 2; ++twice) metadata.add(std::as_bytes(std::span(first)));
    CHECK(has(words_of(ErrorKind::corrupt, [&] { metadata.add(std::as_bytes(std::span(other))); }),
              "tensor \"w\": two ranks record different shapes or dtypes"));
  }
}

TEST_CASE("torch.distributed.checkpoint") {
  const std::string item =
      make_zip(torch_parts(whole(tensor("0", "FloatStorage", 4, 0, {1, 4}, {4, 1})), {{"0", std::string(16, 'x')}}));
  const std::string packed = zstd_of(item);
  const std::string bomb = zstd_of(std::string(64 << 20, '\0'));
  for (const HostileSave& save : saves()) {
    CAPTURE(save.name);
    const TemporaryDirectory folder(Medium::memory);
    write_text(folder / ".metadata", metadata_of(save.size, save.parts, item_bytes(save, item, packed, bomb)));
    write_text(folder / "__0_0.distcp", item);
    write_text(folder / "packed.distcp", packed);
    write_text(folder / "bomb.distcp", bomb);
    std::string words;
    try {
      std::vector<std::string> notes;
      const auto tensors = open_checkpoint(*thirdparty::find_checkpoint(folder.path().string()), 0, {}, notes);
      std::vector<std::byte> memory;
      tensors->read_piece(0, 0, tensors->tensors()[0].bytes, memory);
      CHECK(std::ranges::all_of(memory, [](std::byte byte) { return byte == std::byte{'x'}; }));
      CHECK(verify(folder.path()).is_good());
    } catch (const Error& error) {
      words = error.what();
    }
    CHECK(words.empty() == save.words.empty());
    CHECK(has(words, save.words));
    CHECK(words.find('\n') == std::string::npos);
  }
}
