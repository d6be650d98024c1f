// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/listing_exchange.hpp"

#include <fmt/core.h>

#include <map>
#include <utility>

#include "muster/error.hpp"
#include "src/base/byte_archive.hpp"
#include "src/base/message.hpp"
#include "src/checkpoint/assembly/rank_messages.hpp"

namespace muster {
namespace {

/// The rarely used members of a listing as texts; an empty text is an unset member.
struct ListingTexts {
  std::string facts;
  std::string layout;
};

template <class Archive, class Listing, class Texts>
void describe(Archive& archive, Listing& listing, Texts& texts) {
  archive.values(listing.rank);
  archive.all(listing.identity);
  archive.all(listing.set);
  archive.all(texts.facts);
  archive.all(texts.layout);
  constexpr std::size_t least_tensor = 17;  // the dtype and two lengths
  archive.count(listing.tensors, least_tensor);
  for (auto& tensor : listing.tensors) {
    archive.all(tensor.name);
    archive.values(tensor.spec.dtype);
    archive.all(tensor.spec.shape);
  }
  archive.count(listing.places, 2 * sizeof(std::uint64_t));
  for (auto& place : listing.places) {
    archive.all(place.whole);
    archive.all(place.offset);
  }
}

ShardListing listing_in(ByteReader& in) {
  ShardListing listing;
  ListingTexts texts;
  describe(in, listing, texts);
  for (const NamedSpec& tensor : listing.tensors)
    if (!dtype_from_number(static_cast<std::uint8_t>(tensor.spec.dtype))) in.refuse();
  if (!listing.places.empty() && listing.places.size() != listing.tensors.size()) in.refuse();
  if (!texts.facts.empty()) listing.facts = parse_shard_facts({{std::string(shard_metadata_key), texts.facts}});
  if (!texts.layout.empty()) listing.layout = ParallelLayout::parse(texts.layout);
  return listing;
}

}  // namespace

std::vector<std::byte> encode_listings(const ExportSource& mine) {
  const RankRoom room = os::memory_headroom(os::default_backing());
  ByteWriter out;
  out.values(room.bytes, room.limit);
  out.all(mine.whole());
  out.count(mine.listings());
  for (const ShardListing& listing : mine.listings()) {
    const ListingTexts texts{listing.facts ? shard_facts_text(*listing.facts) : std::string(),
                             listing.layout ? to_string(*listing.layout) : std::string()};
    describe(out, listing, texts);
  }
  return out.take();
}

std::vector<std::vector<std::byte>> gather_listings(group::BaseGroup& group, std::vector<std::byte> mine) {
  return gather_messages(group, std::move(mine), {.phase = "export: gathering the lists of tensors"});
}

std::vector<ShardListing> read_listings(std::span<const std::vector<std::byte>> told, const std::string& whole,
                                        std::vector<RankRoom>& rooms) {
  std::vector<ShardListing> listings;
  rooms.clear();
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    ByteReader in(told[rank], fmt::format("the list of tensors of rank {}", rank));
    RankRoom& room = rooms.emplace_back();
    std::string their_whole;
    std::uint64_t count = 0;
    in.values(room.bytes, room.limit);
    if (room.limit > os::MemoryLimit::mount) in.refuse();
    in.all(their_whole);
    in.values(count);
    if (their_whole != whole)
      throw Error(
          ErrorKind::rank_mismatch,
          fmt::format(
              "rank {} and rank 0 read different files of the checkpoint. Export it after it is complete on all hosts",
              rank),
          {.rank = static_cast<int>(rank)});
    for (std::uint64_t i = 0; i < count; ++i) listings.push_back(listing_in(in));
    in.end();
  }
  return listings;
}

void check_rooms(const Group& group, std::span<const RankRoom> rooms, std::span<const std::uint64_t> needed,
                 std::string_view purpose, std::string_view alternative) {
  std::map<int, std::uint64_t> by_host;
  for (int rank = 0; rank < group.size(); ++rank)
    by_host[group.host_of(rank)] += needed[static_cast<std::size_t>(rank)];
  for (int rank = 0; rank < group.size(); ++rank) {
    const RankRoom& room = rooms[static_cast<std::size_t>(rank)];
    const std::uint64_t all = by_host[group.host_of(rank)];
    if (all <= room.bytes) continue;
    throw Error(ErrorKind::out_of_space,
                fmt::format("too little {} on host {}: needed {}, available {} ({}). Give the job more memory, or {}",
                            purpose, group.info(rank).host, byte_text(all), byte_text(room.bytes),
                            os::to_string(room.limit), alternative));
  }
}

}  // namespace muster
