// SPDX-License-Identifier: Apache-2.0
// Names and shapes of many ranks become those of a model, and back, for any layout. Contradictions are refused with the
// names of the tensors.

#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/placement.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "tests/support/plans.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::plan_of;
using test::words_of;

namespace {

NamedSpec spec(std::string name, Shape shape, DType dtype = DType::f32) {
  return {std::move(name), {dtype, std::move(shape)}};
}

using ListsOfRanks = std::vector<RankTensors>;

ListsOfRanks ranks_of(std::vector<std::vector<NamedSpec>> lists) {
  ListsOfRanks ranks;
  for (auto& list : lists) ranks.push_back({std::move(list), {}});
  return ranks;
}

ParallelLayout tensor_parallel(std::size_t ranks) {
  return {.tensor = static_cast<int>(ranks)};
}

std::string refused(const MergePlan& plan, const ParallelLayout& layout, const ListsOfRanks& ranks,
                    ErrorKind kind = ErrorKind::invalid_argument) {
  return words_of(kind, [&] { arrange(plan, layout, ranks); });
}

// Cuts a model for `layout`. Returns the lists of tensors that the shards would have.
ListsOfRanks cut(const MergePlan& plan, const ParallelLayout& layout, const std::vector<NamedSpec>& model) {
  const auto wholes = wholes_of(plan, model);
  const Placement placement = place(plan, layout, wholes);
  ListsOfRanks ranks(placement.ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const PlacedTensor& placed : placement.ranks[rank])
      ranks[rank].tensors.push_back({placed.name, placement.cuts[placed.whole].part});
    ranks[rank].padded = placement.padded[rank];
    ranks[rank].heads = placement.heads[rank];
    ranks[rank].is_ours = true;
  }
  return ranks;
}

constexpr const char* moe_numbers =
    R"("layers": {"match": "*layers.#.*", "renumber": true}, "experts": "*experts.#.*", )";
constexpr const char* moe_rules =
    R"({"match": "embed", "action": "concat", "dim": 0},
       {"match": "head", "action": "concat", "dim": 0, "stage": "last"},
       {"match": "tied", "action": "same", "stage": "ends"},
       {"match": "rotary", "action": "same", "stage": "all"},
       {"match": "*.experts.*.up", "action": "concat", "dim": 0},
       {"match": "*.experts.*.down", "action": "concat", "dim": 1},
       {"match": "*.fused", "action": "concat", "dim": 0, "across": "expert"},
       {"match": "*", "action": "same"})";

std::vector<NamedSpec> moe_model(int layers, int experts) {
  std::vector<NamedSpec> model = {spec("embed", {10, 4}), spec("head", {10, 4}), spec("tied", {3}),
                                  spec("rotary", {2})};
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    model.push_back(spec(prefix + "norm", {4}));
    model.push_back(spec(prefix + "fused", {8, 4}));
    for (int expert = 0; expert < experts; ++expert) {
      const std::string name = prefix + "experts." + std::to_string(expert);
      model.push_back(spec(name + ".up", {6, 4}));
      model.push_back(spec(name + ".down", {4, 6}));
    }
  }
  return model;
}

}  // namespace

TEST_CASE("tensors without a rule are listed, at most ten of them") {
  const MergePlan plan = plan_of(R"({"match": "a", "action": "same"})");
  const ListsOfRanks ranks =
      ranks_of(std::vector<std::vector<NamedSpec>>(2, {spec("a", {1}), spec("b", {1}), spec("c\n", {1})}));
  CHECK(has(refused(plan, tensor_parallel(2), ranks), R"(the tensors "b", "c\n". Add a rule)"));
  std::vector<NamedSpec> many;
  for (int i = 0; i < 14; ++i) many.push_back(spec("x" + std::to_string(i), {1}));
  CHECK(has(refused(plan, tensor_parallel(1), ranks_of({many})), "and 4 more"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { wholes_of(plan, many); }), "and 4 more"));
}

TEST_CASE("two sources for one name are refused") {
  const MergePlan plan = plan_of(R"({"match": "*", "action": "same"})");
  CHECK(has(refused(plan, tensor_parallel(2), ranks_of({{spec("a", {1})}, {spec("a", {1}), spec("a", {1})}})),
            "rank 1 has two sources"));
}

TEST_CASE("shapes that do not fit are refused with both ranks' shapes") {
  const MergePlan plan = plan_of(
      R"({"match": "s*", "action": "same"}, {"match": "c*", "action": "concat", "dim": -1}, {"match": "d", "action": "concat", "dim": 2}, {"match": "f", "action": "first"}, {"match": "m", "action": "max"}, {"match": "k", "action": "stack"})");
  const auto merge = [&](NamedSpec a, NamedSpec b) {
    return arrange(plan, tensor_parallel(2), ranks_of({{std::move(a)}, {std::move(b)}})).tensors;
  };
  const auto mismatch = [&](NamedSpec a, NamedSpec b) {
    return words_of(ErrorKind::rank_mismatch, [&] { merge(std::move(a), std::move(b)); });
  };
  CHECK(has(mismatch(spec("s", {2, 3}), spec("s", {2, 4})), "rank 0 has F32 [2, 3], rank 1 has F32 [2, 4]"));
  CHECK(has(mismatch(spec("s", {2}), spec("s", {2}, DType::bf16)), "rank 1 has BF16 [2]"));
  CHECK(has(mismatch(spec("m", {2}), spec("m", {3})), "\"max\" requires equal dtypes"));
  CHECK(has(mismatch(spec("k", {2}), spec("k", {3})), "\"stack\" requires equal dtypes"));
  CHECK(has(mismatch(spec("c", {2, 3}), spec("c", {4, 3})), "differ in dimension 1 only"));
  CHECK(has(mismatch(spec("c", {2, 3}), spec("c", {2})), "differ in dimension 1 only"));
  CHECK(has(mismatch(spec("c", {2}), spec("c", {2}, DType::f16)), "rank 1 has F16 [2]"));
  CHECK(has(mismatch(spec("c", {2}), spec("c2", {2})), "it does not exist on rank 1"));
  CHECK(has(mismatch(spec("s", {2}), spec("f", {2})), "it does not exist on rank 1"));
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] {
                       merge(spec("d", {2, 3}), spec("d", {2, 3}));
                     }),
            "dimension 2 is out of range"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { merge(spec("c", {}), spec("c", {})); }),
            "dimension -1 is out of range"));
  const std::int64_t huge = std::int64_t{1} << 62;
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] {
                       merge(spec("c", {0, huge}), spec("c", {0, huge}));
                     }),
            "63 bits"));
  CHECK(merge(spec("c", {2, 3}), spec("c", {2, 4}))[0].layout.target.shape == Shape{2, 7});
  const ArrangedTensor first = merge(spec("f", {2}), spec("f", {7}))[0];
  CHECK(first.layout.target.shape == Shape{2});
  CHECK(first.sources == std::vector{SourceRef{0, 0}});
  CHECK(first.unused == std::vector{SourceRef{1, 0}});
  CHECK(merge(spec("k", {3}), spec("k", {3}))[0].layout.target.shape == Shape{2, 3});
}

TEST_CASE("padding that contradicts the plan is refused") {
  const MergePlan plan = plan_of(R"({"match": "*", "action": "concat", "dim": 0})");
  const auto with = [&](PaddedSizes padded) {
    ListsOfRanks ranks = ranks_of(std::vector<std::vector<NamedSpec>>(2, {spec("a", {3, 2})}));
    for (RankTensors& rank : ranks) rank.padded = padded;
    return ranks;
  };
  CHECK(arrange(plan, tensor_parallel(2), with({{"a", {0, 5}}})).tensors[0].layout.target.shape == Shape{5, 2});
  CHECK(has(refused(plan, tensor_parallel(2), with({{"a", {1, 2}}})), "the shards split it along dimension 1"));
  CHECK(has(refused(plan, tensor_parallel(2), with({{"a", {0, 7}}})), "is 7, but the ranks have only 6"));
  CHECK(has(refused(plan, tensor_parallel(2), with({{"a", {0, -1}}})), "is -1, but the ranks have only"));
  ListsOfRanks differing = with({{"a", {0, 5}}});
  differing[1].padded["a"].second = 6;
  CHECK(has(refused(plan, tensor_parallel(2), differing, ErrorKind::rank_mismatch), "record different paddings"));
}

TEST_CASE("a size in the plan trims the padding of a vocabulary") {
  const MergePlan plan = plan_of(R"({"match": "*", "action": "concat", "dim": 0, "trim": 5})");
  const auto ranks = ranks_of(std::vector<std::vector<NamedSpec>>(2, {spec("a", {4, 2})}));
  const Arrangement arrangement = arrange(plan, tensor_parallel(2), ranks);
  CHECK(arrangement.tensors[0].layout.target.shape == Shape{5, 2});
  CHECK(arrangement.tensors[0].layout.pieces.back().count == 1);
}

TEST_CASE("two results with one name, and dropped tensors") {
  const MergePlan plan = plan_of(
      R"({"match": "a.*", "action": "same", "rename": "x.$1"}, {"match": "b.*", "action": "same", "rename": "x.$1"}, {"match": "old.*", "action": "drop"})");
  CHECK(has(refused(plan, tensor_parallel(1), ranks_of({{spec("a.w", {1}), spec("b.w", {1})}})),
            "one name to several tensors: \"x.w (of a.w and b.w)\""));
  const Arrangement arrangement = arrange(plan, tensor_parallel(1), ranks_of({{spec("a.w", {1}), spec("old.w", {1})}}));
  REQUIRE(arrangement.tensors.size() == 1);
  CHECK(arrangement.tensors[0].name == "x.w");
  REQUIRE(arrangement.dropped.size() == 1);
  CHECK(arrangement.dropped[0].origin == "old.w");
}

TEST_CASE("a model that is cut for any layout and joined is the same model") {
  const MergePlan plan = plan_of(moe_rules, moe_numbers);
  const std::vector<NamedSpec> model = moe_model(5, 4);
  for (const char* text :
       {"1", "2", "3", "4", "7", "tp=2,pp=2,ep=2", "pp=3", "ep=4", "tp=3,pp=2", "pp=2,ep=2", "pp=5"}) {
    CAPTURE(text);
    const ParallelLayout layout = ParallelLayout::parse(text);
    const ListsOfRanks ranks = cut(plan, layout, model);
    REQUIRE(ranks.size() == static_cast<std::size_t>(layout.ranks()));
    const Arrangement again = arrange(plan, layout, ranks);
    REQUIRE(again.tensors.size() == model.size());
    for (const NamedSpec& tensor : model) {
      CAPTURE(tensor.name);
      const auto found = std::ranges::find(again.tensors, tensor.name, &ArrangedTensor::name);
      REQUIRE(found != again.tensors.end());
      CHECK(found->layout.target == tensor.spec);
    }
  }
}

TEST_CASE("stages count their layers from 0, and replicas are compared") {
  const MergePlan plan = plan_of(moe_rules, moe_numbers);
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2,ep=2");
  const ListsOfRanks ranks = cut(plan, layout, moe_model(3, 4));
  const auto has_name = [&](int rank, const std::string& name) {
    return std::ranges::any_of(ranks[static_cast<std::size_t>(rank)].tensors,
                               [&](const NamedSpec& tensor) { return tensor.name == name; });
  };
  CHECK(has_name(0, "layers.1.norm"));
  CHECK(has_name(4, "layers.0.norm"));
  CHECK_FALSE(has_name(4, "layers.1.norm"));
  CHECK(has_name(0, "layers.0.experts.1.up"));
  CHECK_FALSE(has_name(0, "layers.0.experts.2.up"));
  CHECK(has_name(2, "layers.0.experts.2.up"));
  CHECK(has_name(0, "embed"));
  CHECK_FALSE(has_name(4, "embed"));
  CHECK(has_name(4, "head"));
  CHECK(has_name(0, "tied"));
  CHECK(has_name(4, "tied"));
  const Arrangement whole = arrange(plan, layout, ranks);
  const auto norm = std::ranges::find(whole.tensors, "layers.2.norm", &ArrangedTensor::name);
  REQUIRE(norm != whole.tensors.end());
  REQUIRE(norm->equal.size() == 1);
  CHECK(norm->equal[0].size() == 4);  // two tensor-parallel ranks, each on two expert ranks, of one stage
  const auto expert = std::ranges::find(whole.tensors, "layers.0.experts.3.up", &ArrangedTensor::name);
  CHECK(expert->equal.empty());
  const auto embed = std::ranges::find(whole.tensors, "embed", &ArrangedTensor::name);
  CHECK(embed->equal.size() == 2);  // each half, on two expert ranks
  // Tensors with equal numbers of bytes but different shapes are not copies.
  ListsOfRanks turned = ranks;
  const auto copy = std::ranges::find(turned[2].tensors, "embed", &NamedSpec::name);
  REQUIRE(copy != turned[2].tensors.end());
  std::ranges::reverse(copy->spec.shape);
  CHECK(
      has(refused(plan, layout, turned, ErrorKind::rank_mismatch), "rank 0 has F32 [5, 4], and rank 2 has F32 [4, 5]"));
}

TEST_CASE("names that occur twice over expert ranks or stages are refused with the names") {
  const MergePlan plan = plan_of(moe_rules, moe_numbers);
  const std::vector<NamedSpec> local = {spec("layers.0.experts.0.up", {2, 2}), spec("layers.0.experts.1.up", {2, 2})};
  const std::string words = refused(plan, {.expert = 2}, ranks_of({local, local}));
  CHECK(has(words, "\"layers.0.experts.0.up\", \"layers.0.experts.1.up\" have more than one source"));
  CHECK(has(words, "renumber"));
  const std::vector<NamedSpec> stage = {spec("layers.0.norm", {1}), spec("embed", {2, 2})};
  CHECK(has(refused(plan, {.pipeline = 2}, ranks_of({stage, stage})), "\"embed\" has more than one source"));
  const MergePlan numbered =
      plan_of(moe_rules, R"("layers": "*layers.#.*", "experts": {"match": "*experts.#.*", "renumber": true}, )");
  CHECK(arrange(numbered, {.expert = 2}, ranks_of({local, local})).tensors.size() == 4);
}

TEST_CASE("incomplete sequences of layer or expert numbers are refused") {
  const MergePlan plan = plan_of(moe_rules, moe_numbers);
  const auto expert = [](int number) { return spec("layers.0.experts." + std::to_string(number) + ".up", {2, 2}); };
  CHECK(has(refused(plan, {.expert = 2}, ranks_of({{expert(0), expert(1)}, {expert(3)}})), "no rank has expert 2"));
  const auto layer = [](int number) { return spec("layers." + std::to_string(number) + ".norm", {1}); };
  CHECK(has(
      refused(plan, {.pipeline = 2}, ranks_of({{layer(0), layer(1)}, {layer(1), layer(2)}}), ErrorKind::rank_mismatch),
      "pipeline stage 1 has the layers 1, 2"));
  CHECK(arrange(plan, {.pipeline = 2}, ranks_of({{layer(0), layer(1)}, {layer(2), layer(3)}})).tensors.size() == 4);
}

TEST_CASE("a layout that does not match the plan or the ranks") {
  const MergePlan plan = plan_of(moe_rules);
  CHECK(has(refused(plan, {.pipeline = 2}, ranks_of({{}, {}})), "the pattern for the number of a layer"));
  CHECK(has(refused(plan, {.expert = 2}, ranks_of({{}, {}})), "the pattern for the number of an expert"));
  CHECK(has(refused(plan, {.tensor = 2}, ranks_of({{}})), "has 2 ranks, and the source has 1"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { place(plan, {.pipeline = 2}, {}); }), "\"layers\""));
}

TEST_CASE("layouts as text") {
  CHECK(ParallelLayout::parse("4") == ParallelLayout{.tensor = 4});
  CHECK(ParallelLayout::parse("pp=2,tp=3") == ParallelLayout{.tensor = 3, .pipeline = 2});
  for (const char* text : {"", "0", "-1", "4x", "tp=0", "tp=2,tp=2", "dp=2", "tp=", "tp=2,", "5000", "tp=100,pp=100",
                           "99999999999999999999"}) {
    CAPTURE(text);
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { ParallelLayout::parse(text); }), "layout \""));
  }
  for (int rank = 0; rank < 24; ++rank) {
    const ParallelLayout layout{.tensor = 2, .pipeline = 3, .expert = 4};
    CHECK(layout.rank(layout.coordinates(rank)) == rank);
  }
}

TEST_CASE("scales follow their weights") {
  const MergePlan plan = plan_of(
      R"({"match": "row.scale", "action": "scale", "dim": 0}, {"match": "column.scale", "action": "scale", "dim": 1})");
  const auto merged = [&](const std::string& name, Shape shape) {
    const auto ranks = ranks_of(std::vector<std::vector<NamedSpec>>(2, {spec(name, std::move(shape))}));
    return arrange(plan, tensor_parallel(2), ranks).tensors.at(0).layout;
  };
  CHECK(merged("row.scale", {}).combine == merge::Combine::max);
  CHECK(merged("row.scale", {1}).combine == merge::Combine::max);
  CHECK(merged("row.scale", {4, 1}).target.shape == Shape{8, 1});
  CHECK(merged("column.scale", {4}).must_equal.size() == 1);
  CHECK(merged("column.scale", {4, 1}).must_equal.size() == 1);
  CHECK(merged("column.scale", {4, 3}).target.shape == Shape{4, 6});
  // In the inverse direction all ranks get a scalar. A part that only looks like a scalar afterwards is recorded.
  CHECK(cut(plan, tensor_parallel(2), {spec("row.scale", {1})})[1].tensors[0].spec.shape == Shape{1});
  const ListsOfRanks ones = cut(plan, tensor_parallel(2), {spec("row.scale", {2})});
  CHECK(ones[1].tensors[0].spec.shape == Shape{1});
  CHECK(arrange(plan, tensor_parallel(2), ones).tensors[0].layout.target.shape == Shape{2});
}

TEST_CASE("a scale with one row or column of blocks per rank keeps every block") {
  const MergePlan plan = MergePlan::load("llama");
  struct Case {
    Shape weight, scale, merged;  // shapes on one rank; merged: on all 8 ranks
    const char* name;
  };
  for (const Case& each :
       {Case{{128, 512}, {1, 4}, {8, 4}, "mlp.up_proj.weight_scale"},
        Case{{512, 128}, {4, 1}, {4, 8}, "mlp.down_proj.weight_scale"},
        Case{{128, 128}, {1, 1}, {8, 1}, "mlp.up_proj.weight_scale_inv"},
        Case{{128, 128}, {1, 1}, {1, 8}, "mlp.down_proj.weight_scale_inv"},
        Case{{128, 128}, {1, 1}, {1, 1}, "mlp.down_proj.weight_scale"},  // of the whole weight
        Case{{512, 128}, {512, 1}, {512, 1}, "mlp.down_proj.weight_scale"},
        Case{{16, 512}, {1, 4}, {1, 4}, "mlp.up_proj.weight_scale"}}) {  // the rows of all ranks are one block
    CAPTURE(each.name);
    CAPTURE(each.weight);
    const std::string name = std::string("layers.0.") + each.name;
    const auto ranks = ranks_of(std::vector<std::vector<NamedSpec>>(
        8, {spec(name.substr(0, name.rfind('.')) + ".weight", each.weight), spec(name, each.scale)}));
    const Arrangement arrangement = arrange(plan, tensor_parallel(8), ranks);
    CHECK(arrangement.tensors.at(1).layout.target.shape == each.merged);
  }
  const auto through = ranks_of(std::vector<std::vector<NamedSpec>>(
      8, {spec("layers.0.mlp.up_proj.weight", {64, 512}), spec("layers.0.mlp.up_proj.weight_scale", {1, 4})}));
  CHECK(has(refused(plan, tensor_parallel(8), through), "the shards split blocks of the weight"));
}

TEST_CASE("a cut through the blocks of a scale is refused, a cut between them can be inverted") {
  const MergePlan plan = MergePlan::load("llama");
  const auto model = [](Shape weight, Shape scale, const std::string& name = "up_proj") {
    return std::vector<NamedSpec>{spec("layers.0.mlp." + name + ".weight", std::move(weight)),
                                  spec("layers.0.mlp." + name + ".weight_scale_inv", std::move(scale))};
  };
  for (const std::size_t ranks : {2U, 4U, 8U}) {
    CAPTURE(ranks);
    const auto whole = model({1024, 512}, {8, 4});
    const Arrangement again = arrange(plan, tensor_parallel(ranks), cut(plan, tensor_parallel(ranks), whole));
    CHECK(again.tensors.at(1).layout.target.shape == Shape{8, 4});
  }
  const ListsOfRanks of_all_rows = cut(plan, tensor_parallel(2), model({1024, 512}, {1, 4}));
  CHECK(of_all_rows[1].tensors[1].spec.shape == Shape{1, 4});
  for (const auto& [whole, ranks] :
       std::vector<std::pair<std::vector<NamedSpec>, std::size_t>>{{model({1024, 512}, {8, 4}), 16},
                                                                   {model({1024, 512}, {8, 4}), 3},
                                                                   {model({128, 512}, {1, 4}), 2},
                                                                   {model({300, 512}, {3, 4}), 3},
                                                                   {model({512, 256}, {4, 2}, "down_proj"), 4}}) {
    CAPTURE(ranks);
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { cut(plan, tensor_parallel(ranks), whole); }),
              "splits its blocks of 128"));
  }
}

TEST_CASE("heads that several ranks have are merged once, according to config.json") {
  const Config config = parse_json(
      R"({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 64}})");
  const MergePlan plan = MergePlan::load("llama", &config);
  const std::vector<NamedSpec> model = {
      spec("layers.0.self_attn.k_proj.bias", {8}),         spec("layers.0.self_attn.k_proj.weight", {8, 64}),
      spec("layers.0.self_attn.k_proj.weight_scale", {8}), spec("layers.0.self_attn.o_proj.weight", {64, 32}),
      spec("layers.0.self_attn.q_proj.weight", {32, 64}),  spec("layers.0.self_attn.qkv_proj.weight", {48, 64}),
      spec("layers.0.self_attn.v_proj.k_scale", {2}),
  };
  for (const std::size_t count : {2U, 3U, 4U, 5U, 8U}) {
    CAPTURE(count);
    ListsOfRanks ranks = cut(plan, tensor_parallel(count), model);
    for (const bool is_ours : {true, false}) {
      if (!is_ours && 8 % count != 0) continue;  // no engine cuts like this
      for (RankTensors& rank : ranks) {
        rank.is_ours = is_ours;
        if (!is_ours) rank.heads.clear();
      }
      const Arrangement again = arrange(plan, tensor_parallel(count), ranks);
      REQUIRE(again.tensors.size() == model.size());
      for (std::size_t i = 0; i < model.size(); ++i) {
        CAPTURE(model[i].name);
        CHECK(again.tensors[i].name == model[i].name);
        CHECK(again.tensors[i].layout.target == model[i].spec);
      }
      CHECK(again.notes.empty() == (count < 4 || count == 5));
    }
  }
  const Arrangement eight = arrange(plan, tensor_parallel(8), cut(plan, tensor_parallel(8), model));
  CHECK(has(eight.notes.at(0), "\"layers.0.self_attn.k_proj.bias\" (one of 5): several ranks have the same heads"));
  CHECK(eight.tensors[1].equal ==
        std::vector<std::vector<SourceRef>>{{{0, 1}, {1, 1}, {2, 1}, {3, 1}}, {{4, 1}, {5, 1}, {6, 1}, {7, 1}}});
  REQUIRE(eight.tensors[5].equal.size() == 4);  // two heads of keys, two of values
  CHECK(eight.tensors[5].equal[0][1] == SourceRef{1, 5, 4 * 64 * 4, 4 * 64 * 4});
  const Config without = parse_json(R"({"hidden_size": 64})");
  const MergePlan unsaid = MergePlan::load("llama", &without);
  const auto ranks = ranks_of(std::vector<std::vector<NamedSpec>>(8, {spec("a.self_attn.k_proj.weight", {4, 64})}));
  CHECK(has(refused(unsaid, tensor_parallel(8), ranks), "\"num_key_value_heads\" is missing in config.json"));
}

TEST_CASE("ranks without a head, a layer or an expert are refused; other oddities are reported as notes") {
  const Config config = parse_json(R"({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64})");
  const MergePlan plan = MergePlan::load("moe", &config);
  const std::vector<NamedSpec> model = {
      spec("model.layers.0.self_attn.q_proj.weight", {64, 64}), spec("model.layers.0.mlp.experts.0.w1.weight", {6, 64}),
      spec("model.layers.0.mlp.experts.1.w1.weight", {6, 64}), spec("model.layers.1.self_attn.q_proj.weight", {64, 64}),
      spec("model.layers.1.mlp.experts.gate_up_proj", {4, 8, 8})};
  const auto error = [&](const char* layout) {
    return words_of(ErrorKind::invalid_argument,
                    [&] { place(plan, ParallelLayout::parse(layout), wholes_of(plan, model)); });
  };
  CHECK(has(error("4096"), "has 4096 tensor-parallel ranks, and the model has 4 attention heads"));
  CHECK(has(error("pp=9"), "9 pipeline stages cannot share 2 layers"));
  CHECK(has(error("ep=3"), "3 expert ranks cannot share 2 experts"));
  const auto notes = [&](int ranks) { return place(plan, {.tensor = ranks}, wholes_of(plan, model)).notes; };
  REQUIRE(notes(3).size() == 2);
  CHECK(has(notes(3)[0], "does not divide the number of heads"));
  CHECK(has(notes(3)[1],
            "\"model.layers.1.mlp.experts.gate_up_proj\" (one of 1): each tensor-parallel rank has all experts"));
  CHECK(has(notes(3)[1], "ep=3"));
  const MergePlan unused = plan_of(R"({"match": "a", "action": "same"}, {"match": "b*", "action": "same"})");
  CHECK(has(arrange_model(unused, std::vector{spec("a", {1})}).notes.at(0), "no tensor has rule 2"));
}
