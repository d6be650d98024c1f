// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/export_source.hpp"

#include <fmt/format.h>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"

namespace muster {

namespace {

std::optional<ParallelLayout> layout_said(const ShardListing& listing) {
  return listing.facts ? listing.facts->layout : listing.layout;
}
PlanText plan_said(const ShardListing& listing) {
  return listing.facts ? listing.facts->plan : PlanText();
}

/// Returns a plan's meaning, without comments and regardless of spelling.
Config meaning_of(const std::string& plan_text) {
  Config plan = parse_json(plan_text);
  plan.as_object().erase("comment");
  for (const char* numbering : {"layers", "experts"})
    if (plan.contains(numbering) && plan[numbering].is_object()) plan[numbering].as_object().erase("comment");
  for (const char* list : {"views", "rules"})
    if (plan.contains(list))
      for (Config& item : plan[list].as_array()) item.as_object().erase("comment");
  return plan;
}

bool is_same_plan(const std::string& a, const std::string& b) {
  try {
    return a == b || meaning_of(a) == meaning_of(b);
  } catch (const Error&) {
    return false;  // the text is not a plan
  }
}

}  // namespace

RankTensors to_rank_tensors(ShardListing listing) {
  RankTensors tensors{std::move(listing.tensors), {}};
  tensors.number = listing.rank;
  tensors.places = std::move(listing.places);
  if (!listing.facts) return tensors;
  tensors.padded = std::move(listing.facts->padded);
  tensors.heads = std::move(listing.facts->heads);
  tensors.blocked = std::move(listing.facts->blocked);
  tensors.is_ours = true;
  return tensors;
}

ParallelLayout layout_of(const std::vector<ShardListing>& listings, const std::optional<ParallelLayout>& given) {
  const auto count = static_cast<int>(listings.size());
  // Each process lists the workspace by itself: if its job is still running, they may see different states.
  for (const ShardListing& listing : listings)
    if (listing.set != listings.front().set)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("the workspace changed while it was read: rank {} has {}, rank {} has {}. Try again, or "
                              "choose a step with --step",
                              listings.front().rank, listings.front().set, listing.rank, listing.set),
                  {.rank = listing.rank});
  if (given) {
    if (given->ranks() != count)
      throw Error(ErrorKind::invalid_argument, fmt::format("layout {} has {} ranks, and the source has {} shards",
                                                           to_string(*given), given->ranks(), count));
    return *given;
  }
  const std::optional<ParallelLayout> said = layout_said(listings.front());
  for (const ShardListing& listing : listings)
    if (const auto other = layout_said(listing); other != said)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("the shards have different layouts: rank 0 has {}, rank {} has {}",
                              said ? to_string(*said) : "(none)", listing.rank, other ? to_string(*other) : "(none)"),
                  {.rank = listing.rank});
  return said.value_or(ParallelLayout{.tensor = count});
}

MergePlan plan_of(const std::vector<ShardListing>& listings, const std::string& given, const Config* model_config,
                  std::vector<std::string>& notes) {
  const ShardListing& first = listings.front();
  const PlanText said = plan_said(first);
  for (const ShardListing& listing : listings)
    if (plan_said(listing) != said)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("the shards of rank {} and rank {} have different plans", listing.rank, first.rank),
                  {.rank = listing.rank});
  if (given.empty()) {
    if (said.text.empty())
      throw Error(ErrorKind::invalid_argument,
                  "the shards do not record their plan. Pass --plan: auto, the name of a built-in plan, or a file");
    return MergePlan::parse(said.text, said.name, model_config);
  }
  MergePlan plan = MergePlan::load(given, model_config);
  if (!said.text.empty() && said.name != as_it_is && !is_same_plan(plan.text(), said.text))
    notes.push_back(fmt::format("the shards record the plan {}, and the given plan {} is used", in_quotes(said.name),
                                in_quotes(plan.name())));
  return plan;
}

std::optional<Config> config_of(const Request& request) {
  if (const auto given = request.files.find("config.json"); given != request.files.end()) {
    try {
      return parse_json(given->second);
    } catch (const Error& error) {
      throw error.with_context("files: parsing \"config.json\"");
    }
  }
  if (request.base_model.empty() && request.path.empty()) return std::nullopt;
  std::optional<Config> config = read_model_config(request.base_model.empty() ? request.path : request.base_model);
  if (!request.base_model.empty() && !config)
    throw file_error(ErrorKind::not_found, "reading the base model", request.base_model, "config.json does not exist");
  return config;
}

}  // namespace muster
