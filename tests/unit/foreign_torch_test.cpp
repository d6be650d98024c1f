// SPDX-License-Identifier: Apache-2.0
// Tests pickles in all forms in which PyTorch has written tensors, the search for the weights in them, and the
// detection of kinds of files.

#include <doctest/doctest.h>
#include <fmt/core.h>

#include <cstring>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/checkpoint/source.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/formats/file_kind.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/torch_files.hpp"

using namespace muster;
using namespace muster::test;
using namespace muster::test::pickled;

namespace {

std::string old_text(std::string_view value) {
  return "U" + std::string(1, static_cast<char>(value.size())) + std::string(value);
}
std::string list(const std::vector<std::string>& items) {
  std::string out = "](";
  for (const std::string& item : items) out += item;
  return out + "e";
}
const std::string none_object = "N";
const std::string no_hooks = call(global("collections", "OrderedDict"), ")");

/// A tensor with the elements [first, first + count) of the storage "0", which holds the numbers 0 to 7.
std::string floats(int first, int count) {
  return tensor("0", "FloatStorage", 8, first, {count}, {1});
}
std::string scalar(int place) {
  return tensor("0", "FloatStorage", 8, place, {}, {});
}
std::string oldest_arguments(int first, int count, const std::string& storage_node) {
  return tuple(storage_node, number(first), numbers({count}), numbers({1}));
}
std::string built(const std::string& object, const std::string& state) {
  return object + state + "b";
}
std::string pair_of(const std::string& key, const std::string& value) {
  return list({key, value});
}
std::string weights(const std::string& node) {
  return dict({{"w", node}});
}
/// The state_dict of an optimizer with one tensor.
std::string optimizer() {
  return dict({{"state", "}(" + number(0) + dict({{"exp_avg", floats(0, 4)}}) + "u"}, {"param_groups", list({"}"})}});
}

struct TorchCase {
  std::string name;
  std::string body;
  std::string tensors = "w[4]=1,2,3,4";  ///< "NAME[SHAPE]=VALUES NAME[SHAPE]=VALUES", in order
  std::string at = {};
  std::string note = {};     ///< part of the omissions; empty: no omissions
  std::string refusal = {};  ///< part of the error message
};

std::vector<TorchCase> ways_to_write_tensors() {
  const std::string storage_0 = storage("0", "FloatStorage", 8);
  const std::string rebuild = global("torch._utils", "_rebuild_tensor");
  const std::string parameter = global("torch.nn.parameter", "Parameter");
  const std::string oldest = call(rebuild, oldest_arguments(1, 4, storage_0));
  const auto view = [](int begin, int count) {
    return tuple(text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu"), number(8),
                 tuple(text("7"), number(begin), number(count))) +
           "Q";
  };
  const auto named = [](std::string_view module, std::string_view name) {
    return dict({{"w", floats(1, 4)}, {"what", global(module, name)}});
  };
  const auto on_device = [](std::string_view dtype) {
    return call(global("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
                tuple(floats(1, 4), global("torch", dtype), text("xla:0"), std::string("\x89")));
  };
  const std::string pairs = list({pair_of(old_text("w"), oldest)});
  std::vector<TorchCase> cases = {
      {"as PyTorch writes it today", weights(floats(1, 4))},
      {"an ordered dict of Python 2", call(global("collections", "OrderedDict"), tuple(pairs))},
      {"an ordered dict with attributes",
       built(call(global("collections", "OrderedDict"), tuple(pairs)), dict({{"_metadata", "}"}}))},
      {"an ordered dict of tuples",
       call(global("collections", "OrderedDict"), tuple(list({tuple(text("w"), floats(1, 4))})))},
      {"before PyTorch 0.4", weights(oldest)},
      {"a Parameter of its data", weights(call(parameter, tuple(oldest)))},
      {"a Parameter with a state",
       weights(built(call(parameter, tuple(oldest)), tuple(std::string("\x88"), std::string("\x89"), no_hooks)))},
      {"a Parameter made empty", weights(built(parameter + ")\x81", tuple(oldest, none_object, none_object,
                                                                          std::string("\x88"), std::string("\x89"))))},
      {"a Parameter by NEWOBJ", weights(parameter + tuple(floats(1, 4)) + "\x81")},
      {"a Variable", weights(call(global("torch.autograd.variable", "Variable"), tuple(oldest)))},
      {"a tensor that gets its storage",
       weights(built(call(global("torch", "FloatTensor"), ")"), oldest_arguments(1, 4, storage_0)))},
      {"on a GPU", weights(built(call(global("torch.cuda", "FloatTensor"), ")"),
                                 oldest_arguments(1, 4,
                                                  tuple(text("storage"), global("torch.cuda", "FloatStorage"),
                                                        text("0"), text("cuda:0"), number(8)) +
                                                      "Q")))},
      {"a view of a storage", weights(call(rebuild, oldest_arguments(0, 4, view(1, 4))))},
      {"past a view", weights(call(rebuild, oldest_arguments(1, 4, view(1, 4)))), "", "", "",
       "out of range of its storage"},
      {"a view past its storage", weights(call(rebuild, oldest_arguments(0, 4, view(5, 4)))), "", "", "",
       "a view of a storage is out of range"},
      {"on another device", weights(on_device("float32"))},
      {"on another device in another dtype", weights(on_device("float16")), "", "", "",
       "its stored dtype differs from its own, which Muster cannot read"},
      {"a shape that is text",
       weights(call(global("torch._utils", "_rebuild_tensor_v2"),
                    tuple(storage_0, number(0), text("4"), numbers({1}), std::string("\x89"), no_hooks))),
       "", "", "", "malformed shape: it is "},
      {"an extent that is text",
       weights(call(global("torch._utils", "_rebuild_tensor_v2"),
                    tuple(storage_0, number(0), tuple(text("4")), numbers({1}), std::string("\x89"), no_hooks))),
       "", "", "", "malformed shape: an extent is not a number from 0"},
      {"a storage of bytes",
       weights(call(rebuild, oldest_arguments(4, 4,
                                              tuple(text("storage"), global("torch.storage", "UntypedStorage"),
                                                    text("0"), text("cpu"), number(32)) +
                                                  "Q"))),
       "w[4]=0,0,128,63"},
      {"defaultdict(int)", call(global("collections", "defaultdict"), tuple(global("__builtin__", "long"))) + "(" +
                               text("w") + floats(1, 4) + "u"},
      {"a Counter beside it",
       dict({{"w", floats(1, 4)}, {"seen", call(global("collections", "Counter"), tuple(dict({{"a", number(1)}})))}})},
      {"a set of Python 2",
       dict({{"w", floats(1, 4)}, {"seen", call(global("__builtin__", "set"), tuple(list({number(1)})))}})},
      {"bytes and a complex number",
       dict({{"w", floats(1, 4)},
             {"raw", call(global("_codecs", "encode"), tuple(text("x"), text("latin1")))},
             {"z", call(global("__builtin__", "complex"), tuple(number(1), number(2)))},
             {"long", "\x8a\x09" + std::string(9, '\x01')},
             {"longer", "\x8b" + pickled::bytes_of(std::uint32_t{10}) + std::string(10, '\x01')},
             {"device", call(global("torch", "device"), tuple(text("cuda"), number(0)))},
             {"string", "T" + pickled::bytes_of(std::uint32_t{3}) + "abc"},
             {"more", "B" + pickled::bytes_of(std::uint32_t{3}) + "abc"},
             {"most", "\x8e" + pickled::bytes_of(std::uint64_t{3}) + "abc"},
             {"mutable", "\x96" + pickled::bytes_of(std::uint64_t{3}) + "abc"}})},
  };
  for (const std::string_view name : {"long", "int", "unicode", "str", "xrange", "range", "basestring", "object",
                                      "bytearray", "slice", "ValueError", "NoneType", "getattr"})
    for (const std::string_view module : {"__builtin__", "builtins"})
      cases.push_back({fmt::format("{}.{} is a name", module, name), named(module, name)});
  cases.push_back({"an exception of Python 2", named("exceptions", "ValueError")});
  cases.push_back({"a class of OmegaConf", named("omegaconf.dictconfig", "DictConfig")});
  for (const std::string_view name : {"eval", "exec", "execfile", "compile", "__import__", "open", "file", "input",
                                      "apply", "globals", "setattr", "breakpoint"})
    cases.push_back({fmt::format("{} is refused", name), named("__builtin__", name), "", "", "", "can run programs"});
  return cases;
}

std::vector<TorchCase> places_of_weights() {
  const std::string model = weights(floats(1, 4));
  const std::string generator = tensor("0", "ByteStorage", 32, 0, {32}, {1});
  const std::string left_out = " tensors in addition to the weights";
  const std::string cannot = "no key identifies the weights";
  const auto keyed = [&](const std::string& key) {
    return dict({{"w", floats(1, 4)}, {"rest", "}(" + key + floats(0, 4) + "u"}});
  };
  const std::string bytes_key = call(global("_codecs", "encode"), tuple(text("k"), text("latin1")));
  return {
      {"best_acc1", dict({{"state_dict", model}, {"optimizer", optimizer()}, {"best_acc1", scalar(0)}}), "w[4]=1,2,3,4",
       "", "optimizer: 1" + left_out + ". Pass --key to select other ones\nbest_acc1: 1" + left_out},
      {"nanoGPT", dict({{"model", model}, {"optimizer", optimizer()}, {"best_val_loss", scalar(0)}}), "w[4]=1,2,3,4",
       "", left_out},
      {"a loss of one element and a generator, without an optimizer",
       dict({{"model", model}, {"loss", floats(0, 1)}, {"rng_state", generator}}), "w[4]=1,2,3,4", "",
       "rng_state: 1" + left_out},
      {"a loss of one element, without an optimizer", dict({{"model", model}, {"loss", floats(0, 1)}}), "w[4]=1,2,3,4",
       "", "loss: 1" + left_out},
      {"a vector of losses", dict({{"model", model}, {"optimizer", optimizer()}, {"losses", floats(0, 4)}}),
       "w[4]=1,2,3,4", "", "losses: 1" + left_out},
      {"a model of parts", dict({{"model", model}, {"head", floats(4, 4)}}), "model.w[4]=1,2,3,4 head[4]=4,5,6,7"},
      {"no usual key", dict({{"net", model}, {"optimizer", optimizer()}, {"best", scalar(0)}}), "", "", "", cannot},
      {"no usual key and no optimizer", dict({{"net", model}, {"best", scalar(0)}}), "", "", "", cannot},
      {"no usual key, chosen", dict({{"net", model}, {"optimizer", optimizer()}, {"best", scalar(0)}}), "w[4]=1,2,3,4",
       "net", left_out},
      {"all of it, chosen", dict({{"net", model}, {"best", scalar(0)}}), "net.w[4]=1,2,3,4 best[]=0", "."},
      {"weights at the root beside an optimizer", dict({{"w", floats(1, 4)}, {"optim", optimizer()}}), "w[4]=1,2,3,4",
       "", "optim: 1" + left_out},
      {"an optimizer by its groups", dict({{"w", floats(1, 4)}, {"opt", optimizer()}}), "w[4]=1,2,3,4", "",
       "opt: 1" + left_out},
      {"several optimizers", dict({{"w", floats(1, 4)}, {"opts", list({optimizer()})}}), "w[4]=1,2,3,4", "", left_out},
      {"scalars alone", dict({{"w", scalar(1)}, {"v", scalar(2)}}), "w[]=1 v[]=2"},
      {"a key that is a tuple", keyed(tuple(number(0), text("a"))), "w[4]=1,2,3,4", "",
       "rest: 1 tensors below a key that is a tuple"},
      {"a key that is None", keyed(none_object), "w[4]=1,2,3,4", "", "rest: 1 tensors below a key that is None"},
      {"a key of bytes", keyed("C\x01k"), "w[4]=1,2,3,4", "", "rest: 1 tensors below a key that is bytes"},
      {"a key of bytes in protocol 2", keyed(bytes_key), "w[4]=1,2,3,4", "", "below a key that is an opaque object"},
      {"a key that is a real number", keyed("G" + std::string(8, '\0')), "w[4]=1,2,3,4", "", "a key that is a number"},
      {"a tensor in an object",
       dict({{"w", floats(1, 4)},
             {"args", built(call(global("argparse", "Namespace"), ")"), dict({{"mean", floats(0, 2)}}))}}),
       "w[4]=1,2,3,4", "", "args: 1 tensors below an opaque object"},
      {"an array of NumPy",
       dict({{"w", floats(1, 4)}, {"mean", call(global("numpy.core.multiarray", "_reconstruct"), tuple(number(0)))}}),
       "w[4]=1,2,3,4", "", "mean: an array of NumPy"},
      {"a tied tensor under such a key",
       "}(" + text("w") + floats(1, 4) + "q\x01" + text("rest") + "}(" + none_object + "h\x01uu", "w[4]=1,2,3,4", "",
       "rest: 1 tensors below a key that is None"},
  };
}

float value_at(const TensorSource& source, std::size_t tensor, std::size_t index) {
  const TensorEntry& entry = source.tensors()[tensor];
  std::vector<std::byte> bytes(entry.bytes);
  source.read(tensor, 0, bytes);
  if (entry.dtype == DType::u8) return static_cast<float>(std::to_integer<int>(bytes[index]));
  float value = 0;
  std::memcpy(&value, bytes.data() + sizeof value * index, sizeof value);
  return value;
}

std::string tensors_text(const TensorSource& source) {
  std::string out;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    const TensorEntry& entry = source.tensors()[i];
    out += fmt::format("{}{}{}=", i == 0 ? "" : " ", entry.name, to_string(entry.shape));
    for (std::size_t j = 0; j < static_cast<std::size_t>(element_count(entry.shape)); ++j)
      out += fmt::format("{}{}", j == 0 ? "" : ",", value_at(source, i, j));
  }
  return out;
}

std::string eight_floats() {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += pickled::bytes_of(static_cast<float>(i));
  return bytes;
}

/// Returns a file in the format that torch.save used before zip archives.
std::string legacy_file(const std::string& body) {
  const std::string magic("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
  return magic + whole("M\xe9\x03") + whole(dict({{"little_endian", "\x88"}})) + whole(body) +
         whole(list({old_text("0")})) + pickled::bytes_of(std::uint64_t{8}) + eight_floats();
}

void check_torch_cases(const std::vector<TorchCase>& cases) {
  const TemporaryDirectory folder(Medium::memory);
  const std::string path = folder / "file.pt";
  for (const TorchCase& one : cases)
    for (const bool is_legacy : {false, true}) {
      CAPTURE(one.name);
      CAPTURE(is_legacy);
      write_text(path,
                 is_legacy ? legacy_file(one.body) : make_zip(torch_parts(whole(one.body), {{"0", eight_floats()}})));
      std::vector<std::string> notes;
      std::string words;
      std::string tensors;
      std::string all;
      try {
        const auto found = thirdparty::find_checkpoint(path);
        REQUIRE(found.has_value());
        const auto opened = open_checkpoint(*found, 0, {.key = one.at, .file_pattern = {}}, notes);
        tensors = tensors_text(*opened);
        for (const Omission& omission : opened->omissions()) all += omission.name + ": " + omission.reason + "\n";
      } catch (const Error& error) {
        words = error.what();
      }
      CHECK(has(words, one.refusal));
      CHECK(words.empty() == one.refusal.empty());
      if (!one.refusal.empty()) continue;
      CHECK(tensors == one.tensors);
      CHECK(has(all, one.note));
      CHECK(all.empty() == one.note.empty());
    }
}

}  // namespace

TEST_CASE("tensors are read in all the ways in which PyTorch has written them") {
  check_torch_cases(ways_to_write_tensors());
}

TEST_CASE("dtypes of one byte are those that PyTorch names") {
  const TemporaryDirectory folder(Medium::memory);
  const std::string path = folder / "file.pt";
  for (const auto& [name, dtype] :
       {std::pair("float8_e4m3fnuz", DType::f8_e4m3fnuz), std::pair("float8_e5m2fnuz", DType::f8_e5m2fnuz),
        std::pair("float8_e4m3fn", DType::f8_e4m3fn)}) {
    CAPTURE(name);
    const std::string node = call(global("torch._utils", "_rebuild_tensor_v3"),
                                  tuple(storage("0", "UntypedStorage", 32), number(5), numbers({2, 3}), numbers({3, 1}),
                                        std::string("\x89"), no_hooks, global("torch", name)));
    write_text(path, make_zip(torch_parts(whole(weights(node)), {{"0", eight_floats()}})));
    std::vector<std::string> notes;
    const auto opened = open_checkpoint(thirdparty::find_checkpoint(path).value(), 0, {}, notes);
    REQUIRE(opened->tensors().size() == 1);
    CHECK(opened->tensors().front().dtype == dtype);
    CHECK(opened->tensors().front().shape == Shape{2, 3});
    std::vector<std::byte> bytes(6);
    opened->read(0, 0, bytes);
    CHECK(std::memcmp(bytes.data(), eight_floats().data() + 5, 6) == 0);
  }
}

TEST_CASE("the weights of a training checkpoint are found, and the rest is reported") {
  check_torch_cases(places_of_weights());
}

namespace {

struct Signature {
  std::string bytes;
  formats::FileKind kind;
};
std::vector<Signature> signatures() {
  using formats::FileKind;
  const std::string tar = "model/data" + std::string(247, '\0') + "ustar\0" + std::string(100, '\0');
  std::vector<Signature> all = {
      {"PK\x03\x04", FileKind::zip},
      {legacy_file("}"), FileKind::torch_legacy},
      {"\x80\x04\x95" + std::string(8, '\x01') + legacy_file("}").substr(2), FileKind::torch_legacy},
      {"\x89HDF\r\n\x1a\n", FileKind::hdf5},
      {"GGUF\x03", FileKind::gguf},
      {"\x93NUMPY\x01", FileKind::numpy},
      {"\x1f\x8b\x08", FileKind::gzip},
      {"version https://git-lfs.github.com/spec/v1\n", FileKind::lfs_pointer},
      {"<!DOCTYPE html>", FileKind::html},
      {"\n<html lang=en>", FileKind::html},
      {"{\"weight_map\": {}}", FileKind::json},
      {"some other text", FileKind::unknown},
      {"", FileKind::unknown},
      {tar, FileKind::tar}};
  for (const char protocol : {'\x02', '\x03', '\x04', '\x05'})
    all.push_back({std::string("\x80") + protocol + "}.", FileKind::pickle});
  return all;
}

}  // namespace

TEST_CASE("each kind of file is detected, and not confused with another kind") {
  for (const Signature& signature : signatures()) {
    CAPTURE(signature.bytes.substr(0, 20));
    CHECK(formats::kind_of_file(std::as_bytes(std::span(signature.bytes))) == signature.kind);
  }
}

TEST_CASE("a safetensors file is read whatever other kind the length of its header imitates") {
  const TemporaryDirectory folder(Medium::memory);
  for (const Signature& signature : signatures())
    for (std::size_t count = 2; count <= std::min<std::size_t>(4, signature.bytes.size()); ++count) {
      std::uint64_t length = 0;
      std::memcpy(&length, signature.bytes.data(), count);
      if (length < 80 || length > max_safetensors_header) continue;
      CAPTURE(length);
      std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
      if (count < 3) {  // longer headers are detected in the same way
        header.resize(length, ' ');
        // HDF5 searches for its signature at this offset. Here the signature is tensor data.
        std::string data(8, 'x');
        if (8 + length == 512) data = "\x89HDF\r\n\x1a\n";
        for (const char* name : {"a.safetensors", "model.bin", "other.pt"}) {
          write_text(folder / name, pickled::bytes_of(length) + header + data);
          if (std::string(name) == "a.safetensors")
            CHECK(tensors_text(*open_source(folder / name).tensors).starts_with("w[2]="));
          CHECK(!thirdparty::find_checkpoint(folder / name).has_value());
          CHECK(open_source(folder / name).kind == "safetensors");
        }
      }
      const std::string head = pickled::bytes_of(length) + header;
      CHECK(formats::kind_of_file(std::as_bytes(std::span(head))) == formats::FileKind::safetensors);
    }
}

TEST_CASE("other kinds of files are refused with advice") {
  const TemporaryDirectory folder(Medium::memory);
  for (const Signature& signature : signatures()) {
    if (signature.kind == formats::FileKind::unknown || signature.kind == formats::FileKind::json) continue;
    CAPTURE(signature.bytes.substr(0, 20));
    write_text(folder / "model.safetensors", signature.bytes + std::string(512, ' '));
    const std::string words =
        words_of(ErrorKind::corrupt, [&] { SafetensorsFile::open(folder / "model.safetensors"); });
    CHECK(has(words, formats::advice_about(signature.kind)));
    CHECK(words.find("header would have") == std::string::npos);
  }
}
