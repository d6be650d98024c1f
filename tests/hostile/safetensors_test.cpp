// SPDX-License-Identifier: Apache-2.0
// A gallery of safetensors files that are malformed, truncated or attack their reader. Each is refused with its own
// message.

#include <doctest/doctest.h>
#include <fmt/core.h>

#include <array>

#include "muster/safetensors.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/safetensors.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

std::string length_of(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(static_cast<unsigned char>(length >> (8 * i))));
  return bytes;
}

std::string file_of(const std::string& header, std::size_t data_bytes) {
  return length_of(header.size()) + header + std::string(data_bytes, 'd');
}

struct Defect {
  std::string name;
  std::string bytes;
  std::string words;
};

// One tensor "t" of 4 bytes, with the given members.
std::string one(const std::string& members) {
  return file_of(R"({"t":{)" + members + "}}", 4);
}

std::string two(const std::string& first, const std::string& second, std::size_t data_bytes) {
  return file_of(fmt::format(R"({{"a":{{"dtype":"U8",{}}},"b":{{"dtype":"U8",{}}}}})", first, second), data_bytes);
}

const std::string good = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";

std::vector<Defect> gallery() {
  return {
      {"empty file", "", "0 bytes are too few"},
      {"seven bytes", "\x02\0\0\0\0\0\0", "too few"},
      {"length only", length_of(2), "and the file has 8"},
      {"header past the end", length_of(1000) + "{}", "1000 bytes, and the file has 10"},
      {"length above the limit", length_of(100'000'001) + "{}", "100000001 bytes, and the limit is 100000000"},
      {"length of all ones", length_of(~std::uint64_t{0}) + "{}", "the limit is 100000000"},
      {"length that overflows", length_of(~std::uint64_t{7}) + "{}", "the limit is 100000000"},
      {"no header", length_of(0), "does not begin with '{'"},
      {"list", file_of("[]", 0), "does not begin with '{'"},
      {"leading space", file_of(" {}", 0), "does not begin with '{'"},
      {"another format", "PK\x03\x04 some zip archive of torch.save", "not a safetensors file but a zip archive"},
      {"an older format", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 torch.save of old", "not a safetensors file but a pickle"},
      {"not JSON", file_of("{x}", 0), "JSON line 1, column 2"},
      {"cut off JSON", file_of(R"({"t":{"dtype":"F32")", 0), "JSON line 1, column "},
      {"text after the end", file_of("{}{}", 0), "JSON line 1, column "},
      {"trailing comma", file_of(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],}})", 4),
       "JSON line 1, column "},
      {"NUL padding", file_of(std::string("{}\0\0", 4), 0), "column 3: a NUL byte"},
      {"NUL and more", file_of(std::string("{}\0{", 4), 0), "column 3: a NUL byte"},
      {"invalid UTF-8", file_of("{\"\xc3\x28\":{" + good + "}}", 4), "UTF-8"},
      {"overlong UTF-8", file_of("{\"\xc0\xaf\":{" + good + "}}", 4), "UTF-8"},
      {"lone surrogate", file_of(R"({"\ud800":{)" + good + "}}", 4), "surrogate"},
      {"name twice", file_of(R"({"t":{)" + good + R"(},"t":{)" + good + "}}", 4),
       "tensor \"t\": the name is duplicated"},
      {"name twice, escaped", file_of(R"({"t":{)" + good + R"(},"\u0074":{)" + good + "}}", 4), "is duplicated"},
      {"key twice", one(R"("dtype":"F32","dtype":"U8","shape":[1],"data_offsets":[0,4])"),
       "the key \"dtype\" is duplicated"},
      {"other key twice", one(good + R"(,"x":1,"x":2)"), "the key \"x\" is duplicated"},
      {"unknown dtype", one(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"),
       "tensor \"t\": unknown dtype \"F33\""},
      {"lower case dtype", one(R"("dtype":"f32","shape":[1],"data_offsets":[0,4])"), "unknown dtype \"f32\""},
      {"our own dtype", one(R"("dtype":"U4","shape":[8],"data_offsets":[0,4])"), "unknown dtype \"U4\""},
      {"dtype a number", one(R"("dtype":32,"shape":[1],"data_offsets":[0,4])"), "dtype is a number, not a string"},
      {"no dtype", one(R"("shape":[1],"data_offsets":[0,4])"), "tensor \"t\": dtype is missing"},
      {"no shape", one(R"("dtype":"F32","data_offsets":[0,4])"), "shape is missing"},
      {"no offsets", one(R"("dtype":"F32","shape":[1])"), "data_offsets is missing"},
      {"tensor a list", file_of(R"({"t":[]})", 0), "tensor \"t\": the entry is a list, not an object"},
      {"tensor null", file_of(R"({"t":null})", 0), "tensor \"t\": the entry is null"},
      {"negative extent", one(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"),
       "shape has the negative number -1"},
      {"real extent", one(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), "not an integer"},
      {"extent beyond 64 bits", one(R"("dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4])"),
       "an integer does not fit into 64 bits"},
      {"extent beyond 63 bits", one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"),
       "shape overflows"},
      {"shape that overflows", one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"),
       "shape overflows"},
      {"bytes that overflow", one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4])"),
       "shape overflows"},
      {"nested shape", one(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), "shape has a list"},
      {"shape of strings", one(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"), "shape has a string"},
      {"shape a number", one(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), "shape is a number"},
      {"one offset", one(R"("dtype":"F32","shape":[1],"data_offsets":[4])"), "has 1 numbers, expected 2"},
      {"three offsets", one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), "has 3 numbers"},
      {"negative offset", one(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"), "the negative number -4"},
      {"backwards", one(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), "end before they begin"},
      {"offsets of all ones",
       one(R"("dtype":"U8","shape":[0],"data_offsets":[18446744073709551615,18446744073709551615])"), "out of range"},
      {"outside the file", one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"),
       "data_offsets [0, 8] are out of range for the 4 bytes of tensors in the file"},
      {"too few bytes", one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "needs 8 bytes, and data_offsets"},
      {"too many bytes", one(R"("dtype":"U8","shape":[2],"data_offsets":[0,4])"), "needs 2 bytes"},
      {"odd F4", one(R"("dtype":"F4","shape":[7],"data_offsets":[0,4])"), "in the middle of a byte"},
      {"overlap", two(R"("shape":[4],"data_offsets":[0,4])", R"("shape":[4],"data_offsets":[2,6])", 6),
       "tensor \"b\": bytes [2, 6] overlap those of tensor \"a\""},
      {"same bytes", two(R"("shape":[4],"data_offsets":[0,4])", R"("shape":[4],"data_offsets":[0,4])", 4), "overlap"},
      {"hole", two(R"("shape":[2],"data_offsets":[0,2])", R"("shape":[2],"data_offsets":[3,5])", 5),
       "tensor \"b\": gap before the tensor: bytes [2, 3]"},
      {"hole at the beginning", one(R"("dtype":"U8","shape":[2],"data_offsets":[2,4])"),
       "gap before the tensor: bytes [0, 2]"},
      {"hole before an empty one", two(R"("shape":[4],"data_offsets":[0,4])", R"("shape":[0],"data_offsets":[6,6])", 6),
       "gap before the tensor"},
      {"bytes at the end", one(R"("dtype":"U8","shape":[3],"data_offsets":[0,3])"), "1 bytes at the end"},
      {"bytes of nobody", file_of("{}", 100), "100 bytes at the end belong to no tensor"},
      {"metadata a string", file_of(R"({"__metadata__":"x"})", 0), "__metadata__ is a string"},
      {"metadata of numbers", file_of(R"({"__metadata__":{"n":1}})", 0),
       "__metadata__: the value of \"n\" is a number, not a string"},
      {"metadata of objects", file_of(R"({"__metadata__":{"n":{"a":"b"}}})", 0), "\"n\" is an object"},
      {"metadata key twice", file_of(R"({"__metadata__":{"n":"1","n":"2"}})", 0), "the key \"n\" is duplicated"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "tensor \"__metadata__\": the name is duplicated"},
      {"a tensor called __metadata__", file_of(R"({"__metadata__":{)" + good + "}}", 4), "reserved for metadata"},
      {"deep nesting", file_of(R"({"t":{"shape":)" + std::string(1'000'000, '['), 0), "nesting is deeper than 256"},
      {"deep nesting in a member of its own", file_of(R"({"t":{"x":)" + std::string(1'000'000, '['), 0),
       "nesting is deeper than 256"},
      {"own dtype that does not fit",
       file_of(R"({"__metadata__":{"muster.dtype.t":"U4 [9]"},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
               4),
       "the metadata records \"U4 [9]\""},
      {"own dtype of fewer bytes",
       file_of(R"({"__metadata__":{"muster.dtype.t":"U4 [6]"},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
               4),
       "the metadata records \"U4 [6]\""},
      {"own dtype of another kind",
       file_of(R"({"__metadata__":{"muster.dtype.t":"F32 [1]"},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
               4),
       "the metadata records"},
      {"own dtype that overflows",
       file_of(
           R"({"__metadata__":{"muster.dtype.t":"U4 [9223372036854775807, 9]"},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
           4),
       "the metadata records"},
      {"own dtype on a tensor of floats",
       file_of(R"({"__metadata__":{"muster.dtype.t":"I4 [8]"},"t":{)" + good + "}}", 4),
       "does not fit its 4 bytes of F32"},
  };
}

}  // namespace

TEST_CASE("each defect is refused, in one line that names the file") {
  const TemporaryDirectory directory;
  const std::string path = directory / "defect.safetensors";
  for (const Defect& defect : gallery()) {
    INFO(defect.name);
    write_text(path, defect.bytes);
    const std::string words = words_of(ErrorKind::corrupt, [&] { SafetensorsFile::open(path); });
    CHECK(has(words, defect.words));
    CHECK(has(words, "defect.safetensors"));
    CHECK(words.size() < 700);
  }
}

TEST_CASE("unusual files that are allowed") {
  const TemporaryDirectory directory;
  const std::string path = directory / "odd.safetensors";
  const std::array<Defect, 9> odd = {{
      {"nothing", file_of("{}", 0), ""},
      {"spaces at the end", file_of("{}      ", 0), ""},
      {"metadata null", file_of(R"({"__metadata__":null})", 0), ""},
      {"members of its own", one(good + R"(,"x":{"shape":[[{"y":[]}]],"z":null},"w":[1,"2",{}])"), "t"},
      {"not in order", two(R"("shape":[2],"data_offsets":[2,4])", R"("shape":[2],"data_offsets":[0,2])", 4), "b"},
      {"empty tensors between", two(R"("shape":[0],"data_offsets":[0,0])", R"("shape":[2],"data_offsets":[0,2])", 2),
       "a"},
      {"scalar", one(R"("dtype":"F32","shape":[],"data_offsets":[0,4])"), "t"},
      {"an extent of zero hides large ones",
       file_of(R"({"t":{"dtype":"F32","shape":[0,4294967296],"data_offsets":[0,0]}})", 0), "t"},
      {"what a tensor that is gone was", file_of(R"({"__metadata__":{"muster.dtype.t":"nonsense"}})", 0), ""},
  }};
  for (const Defect& each : odd) {
    INFO(each.name);
    write_text(path, each.bytes);
    const SafetensorsFile file = SafetensorsFile::open(path);
    CHECK(file.metadata().empty());
    if (each.words.empty())
      CHECK(file.tensors().empty());
    else
      CHECK(file.tensors().front().name == each.words);
  }
}

TEST_CASE("a valid file is refused at every other length, and a damaged byte causes at most an error") {
  const std::string bytes = file_of(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})",
      19);
  const auto parse = [](const std::string& text) {
    return parse_safetensors_header(std::as_bytes(std::span(text)), text.size(), "x");
  };
  CHECK(parse(bytes).tensors.size() == 2);
  for (std::size_t length = 0; length < bytes.size(); ++length) CHECK_THROWS_AS(parse(bytes.substr(0, length)), Error);
  for (std::size_t i = 0; i < bytes.size() - 19; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      try {
        for (const TensorEntry& entry : parse(damaged).tensors) {
          CHECK(entry.bytes == byte_size(entry.dtype, entry.shape));
          CHECK(entry.offset + entry.bytes <= damaged.size());
        }
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::corrupt);
      }
    }
  }
}
