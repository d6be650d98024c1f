// SPDX-License-Identifier: Apache-2.0
#pragma once
// A stream by MPI: parts of other hosts' senders come in while the first rank uses earlier ones.
//
//  1. A sender waits until fewer than `depth` of its parts are with the first rank: it counts those that it has sent,
//     and the credits that came back.
//  2. It sends a head: the stream's header, the descriptor, and the bytes themselves where they are few.
//  3. The first rank takes heads whenever it may call MPI. Where more bytes follow it takes a buffer, opens its
//     receives, and sends a grant: what is sent has a place already, so that nothing piles up inside MPI.
//  4. The sender sends pieces (mpi_tree.hpp), straight from its tensors, and waits until MPI has done with them.
//  5. When the consumer asks for the part, the first rank waits for its pieces. A credit follows when the buffer's last
//     owner lets it go, on any thread; of a part without bytes, when the consumer has it.
//  6. The end, and every failure that leaves the group well: the sender says bye, the first rank that nothing more will
//     be granted. What was granted is sent all the same, zeros where there is nothing better, and received: then
//     neither side has anything open.
// A wait that fails poisons the group instead; what MPI may still touch is then kept until the process ends.
//
// The first rank is one state machine: each call of step() does what can be done at once. The thread that uses the
// group calls it in all its waits, and whenever the group lets MPI go on. While the consumer runs, another thread does,
// if MPI allows any (MPI_THREAD_MULTIPLE); else what comes in then depends on group.progress().

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "src/gather/route.hpp"
#include "src/mpi/buffer_pool.hpp"
#include "src/mpi/flows.hpp"
#include "src/mpi/mpi_group.hpp"
#include "src/mpi/mpi_tree.hpp"

namespace muster::mpi {

/// Behind the group's data_tag(), which pieces have.
inline constexpr int head_tag = 1;
inline constexpr int word_tag = 2;

/// From the first rank to a sender.
struct PartWord {
  enum class Kind : std::uint32_t { grant = 1, credits = 2, last = 3 };
  Kind kind = Kind::grant;
  std::uint32_t reserved = 0;
  std::uint64_t count = 0;  ///< of credits
};

/// Begins a head.
struct PartHead {
  std::uint64_t header_bytes = 0;
  std::uint64_t descriptor_bytes = 0;
  std::uint64_t moving_bytes = 0;  ///< of the layout
  std::uint32_t has_value = 0;
  std::uint32_t is_inline = 0;  ///< the layout's bytes follow the descriptor
  std::uint32_t is_bye = 0;
  std::uint32_t reserved = 0;
};

class MpiOutlet final : public gather::PartOutlet {
 public:
  MpiOutlet(const gather::Call& call, MpiGroup& group);

  void wait_for_credit(std::size_t depth, const WaitOptions& options) override;
  void offer(const Config* value, gather::Record& record) override;
  void send(std::span<const std::byte> header, const WaitOptions& options) override;
  void settle(SyncGroup& group, const WaitOptions& options) override;

 private:
  template <class Done>
  void wait(MpiGroup& group, const Done& done, const WaitOptions& options);
  void open_words();
  void take_words();
  void send_head(std::span<const std::byte> header, bool rides, const WaitOptions& options);

  int first_;
  MpiGroup& group_;
  Outflow flow_;
  std::shared_ptr<PartWord> word_;
  Pending words_;  // open until the last one
  bool has_last_ = false;
  std::uint64_t sent_ = 0;  // parts
  std::uint64_t credits_ = 0;
  std::uint64_t asked_ = 0;  // parts whose bytes need a grant
  std::uint64_t granted_ = 0;
  // Of the part that is offered.
  OutgoingTree tree_;
  bool has_value_ = false;
  // Of the last part whose head was sent.
  std::vector<Piece> pieces_;
  std::size_t next_piece_ = 0;
};

class MpiInlet final : public gather::PartInlet {
 public:
  MpiInlet(const gather::Call& call, MpiGroup& group, std::uint64_t part_bytes);
  ~MpiInlet() override;
  MpiInlet(const MpiInlet&) = delete;
  MpiInlet& operator=(const MpiInlet&) = delete;

  [[nodiscard]] bool brings(int sender) const override;
  std::vector<std::byte> take_header(int sender, const WaitOptions& options) override;
  std::optional<Config> take_part(int sender, const WaitOptions& options) override;
  void set_unattended(bool unattended) override;
  void settle(SyncGroup& group, const WaitOptions& options) override;
  [[nodiscard]] std::uint64_t peak_bytes() const override { return pool_->peak(); }

 private:
  struct Part {
    std::vector<std::byte> header;
    std::optional<Config> config;
    std::deque<Pending> pieces;
    bool is_counted = false;  // its buffer gives the credit
  };
  struct Sender {
    int rank = 0;
    Pending head;  // being received
    std::shared_ptr<std::vector<std::byte>> head_bytes;
    std::deque<Part> parts;  // the one that is taken next in front
    std::size_t headers_taken = 0;
    Credits released = std::make_shared<std::atomic<std::uint64_t>>(0);
    std::uint64_t told = 0;  // credits
    bool has_said_bye = false;
  };

  Sender& sender(int rank);
  template <class Done>
  void wait(MpiGroup& group, int on, const Done& done, const WaitOptions& options);
  /// Returns whether anything has moved.
  bool step();
  /// Keeps what it throws for the next call that waits.
  bool try_step() noexcept;
  bool step_sender(Sender& sender);
  bool take_head(Sender& sender);
  void open_part(Sender& sender, std::span<const std::byte> message);
  void tell(int rank, const PartWord& word);
  void attend(const std::stop_token& stop);

  MpiGroup& group_;
  Family::UnderWay under_way_;
  std::shared_ptr<BufferPool> pool_;
  std::uint64_t part_bytes_;
  std::vector<Sender> senders_;

  // All above is the state machine's, and under this while another thread may step it.
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool is_unattended_ = false;
  bool is_settling_ = false;
  std::vector<std::pair<int, Pending>> words_;  // on their way, and to whom
  std::exception_ptr failure_;                  // of a step that nobody waited for
  std::jthread attendant_;
};

}  // namespace muster::mpi
