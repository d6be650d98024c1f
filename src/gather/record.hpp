// SPDX-License-Identifier: Apache-2.0
#pragma once
// What every rank tells every other in round 1, and what follows from all records: pure functions, the same on all
// ranks.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/gather.hpp"
#include "muster/sync_group.hpp"
#include "src/base/written.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::gather {

enum class Operation : std::uint8_t { configs = 1, tensors = 2, merge = 3, stream = 4 };
const char* to_string(Operation operation) noexcept;

inline constexpr std::uint32_t record_version = 5;
inline constexpr std::uint32_t no_position = 0xffffffff;

/// Where the tensors of a rank are; those without elements are nowhere.
enum class Residency : std::uint8_t { none = 0, host = 1, device = 2, mixed = 3 };
/// Of both together.
constexpr Residency operator|(Residency a, Residency b) noexcept {
  return static_cast<Residency>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}

/// By what a rank's route is forced.
enum class ForcedBy : std::uint8_t { nobody, caller, workspace_path, environment };

/// Why a list has no route (policy.hpp).
enum class Refusal : std::uint8_t {
  none,
  mixed,                ///< some tensors are on the host, some on devices
  merges_devices,       ///< merges read tensors of the host
  forced_off_devices,   ///< tensors are on devices, the forced route takes those of the host
  no_device_route,      ///< tensors are on devices, and not all ranks can take them from there
  forced_onto_devices,  ///< the device route is forced, for what is on the host
  forced_unusable,      ///< not all ranks can use the forced route
  unreachable,          ///< no route is common to all
  unfit,                ///< a rank has prepared for a route that others cannot use
};

/// A route, or why there is none.
struct Decision {
  Route route = Route::automatic;  ///< of a refusal: the one that it is about, where it is about one
  Refusal refusal = Refusal::none;
  [[nodiscard]] bool is_refused() const noexcept { return refusal != Refusal::none; }
  friend bool operator==(const Decision&, const Decision&) = default;
};

/// A route that, if it is forced, also ranks of one host send by.
constexpr bool is_between_hosts(Route route) noexcept {
  return route == Route::mpi || route == Route::tcp;
}

constexpr std::uint8_t route_bit(Route route) noexcept {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(route));
}

/// Fixed width: what a rank costs the control plane, however much it has to send.
struct Record {
  std::uint32_t version = record_version;
  Operation operation = Operation::configs;
  std::uint8_t status = 0;  // 0: ready, else ErrorKind + 1; the words are fetched when they are needed
  Route forced = Route::automatic;
  std::uint8_t routes = 0;  // bit r: this rank could use Route(r)
  std::uint64_t list_hash = 0;
  std::uint32_t list_length = 0;  // 0: in no list
  std::uint32_t position = no_position;
  std::uint64_t payload_bytes = 0;  // tensor bytes, whether they move or not
  std::uint64_t moving_bytes = 0;   // of these, bytes that the route has to move
  std::uint64_t descriptor_bytes = 0;
  std::uint64_t descriptor_hash = 0;
  std::uint64_t kind_hash = 0;        // what must be equal in a list: dtype and shape, the merge, a stream's options
  std::uint64_t fresh_bytes = 0;      // memory that this rank will take
  std::uint64_t available_bytes = 0;  // as far as this rank knows, where it takes any
  std::uint32_t held = 0;             // results that the first rank holds of this one
  os::MemoryLimit limit = os::MemoryLimit::machine;
  bool has_value : 1 = false;
  bool complete : 1 = false;  // all that moves has been written already (shm_protocol.hpp)
  std::uint8_t merge = 0;     // which kind: 1 + Merge::index()
  bool receives = false;      // this rank takes memory of its own for what others send: needs.hpp
  std::uint64_t segment = 0;  // the place of the one that is used; 0: not known yet
  bool closes = false;        // a second round is needed although this rank has nothing to move
  /// Something has to be checked with the others of the list before bytes move (route.hpp: Preflight).
  bool needs_preflight = false;
  Residency residency = Residency::none;
  ForcedBy forced_by = ForcedBy::nobody;
  // What an operation adds: of a merge; of a stream; of a rank that receives into memory of its own; of devices.
  union {
    std::uint64_t extent = 0;  // the size along the concatenated dimension: all else is in kind_hash
    std::uint64_t budget;      // bytes of all senders of the list
    std::uint64_t device;      // way_choice.hpp
  };
  union {
    std::uint64_t capacity = 0;  // if bytes move, of the first rank: of a free slot that it has
    std::uint64_t hash_low;      // of Same: XXH3-128 of the elements
    std::uint64_t depth;         // pipeline_depth
    std::uint64_t free;          // bytes of its pool that nobody holds
  };
  union {
    std::uint64_t taken = 0;  // bytes of that slot that memory has been taken for
    std::uint64_t hash_high;
    std::uint64_t pooled;  // bytes that this rank has already
    std::uint64_t room;    // by how many more its pool may grow: what its memory_budget leaves
  };
};
static_assert(sizeof(Record) <= 128, "round 1 costs at most 128 bytes a rank");
static_assert(std::is_trivially_copyable_v<Record>);

/// Whether a closing round follows: bytes of some list have yet to move, or a rank asks for it.
bool needs_closing(std::span<const Record> records) noexcept;

/// What a rank says when something is wrong: its own failure, or what it has, so that a mismatch can be shown.
using Words = WrittenError<640>;
static_assert(sizeof(Words) <= SyncGroup::max_record);

std::uint64_t hash_list(std::span<const int> ranks) noexcept;
/// The list that a rank is in, by position. All of its members have the same one.
std::vector<int> list_of(int member, std::span<const Record> records);

/// Why an exchange cannot go on; empty words are filled from the ranks' own.
struct Problem {
  enum class Reason : std::uint8_t {
    failed_ranks,
    versions,
    lists,
    operations,
    kinds,
    contents,
    forced,  // differently on the ranks of a list
    refused,
    budget,
    memory
  };
  Reason reason = Reason::failed_ranks;
  std::vector<int> ranks;  // those it is about
  Decision refused = {};   // of Reason::refused
};

/// Looks at all records; none if the exchange can go on. `group` knows which ranks share memory.
std::optional<Problem> find_problem(std::span<const Record> records, const SyncGroup& group);

/// The error that all ranks throw, made of everyone's words.
Error make_error(const Problem& problem, std::span<const Record> records, std::span<const Words> words,
                 const SyncGroup& group);

/// The failure of the first of these ranks, and how many more have failed.
Error failure_of(std::span<const int> failed, std::span<const Words> words, const SyncGroup& group);

/// "rank 1: words; rank 3: words; and 4 more", with `between` in place of ": ".
std::string each_words(std::span<const int> ranks, std::span<const Words> words, std::string_view between,
                       std::size_t shown);

Words words_of(const Error& error);
Words words_of(const std::string& text);

inline std::uint8_t status_of(ErrorKind kind) noexcept {
  return static_cast<std::uint8_t>(kind) + 1;
}

}  // namespace muster::gather
