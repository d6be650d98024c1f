// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>

#include "muster/log.hpp"
#include "muster/trace.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fixed_string.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/trace/span.hpp"

namespace muster::trace {
namespace {

using Word = std::atomic_ref<std::uint64_t>;

// A thread that is delayed for a whole turn of the ring may write to a record while the next thread uses it. Readers
// treat the result like any other damaged record.
template <class T>
void set(T& field, std::type_identity_t<T> value) noexcept {
  std::atomic_ref(field).store(value, std::memory_order_relaxed);
}

/// Returns eight bytes of a text from `at` on, with zeros after its end.
std::uint64_t word_of(std::string_view text, std::size_t at) noexcept {
  std::uint64_t word = 0;
  if (text.size() >= at + 8)
    std::memcpy(&word, text.data() + at, 8);
  else
    for (std::size_t i = at; i < text.size(); ++i)
      word |= std::uint64_t{static_cast<unsigned char>(text[i])} << 8 * (i - at);
  return word;
}

/// Truncates a text that is too long, and fills the rest with zeros.
void set_detail(TraceRecord& record, std::string_view text) noexcept {
  text = text.substr(0, sizeof record.detail - 1);
  auto* const words = reinterpret_cast<std::uint32_t*>(record.detail.data());
  const std::array<std::uint64_t, 3> pairs = {word_of(text, 0), word_of(text, 8), word_of(text, 16)};
  for (std::size_t i = 0; i < sizeof record.detail / 4; ++i)
    set(words[i], static_cast<std::uint32_t>(pairs[i / 2] >> 32 * (i % 2)));
}

/// Writes the fields from the number of copies to the end of the name: four bytes, and the name.
void set_name(TraceRecord& record, std::uint32_t before, std::string_view name) noexcept {
  name = name.substr(0, sizeof record.name - 1);
  auto* const words = reinterpret_cast<std::uint64_t*>(&record) + offsetof(TraceRecord, copies) / 8;
  std::uint64_t carried = before;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t word = word_of(name, 8 * i);
    set(words[i], carried | word << 32);
    carried = word >> 32;
  }
  set(words[4], carried);
  set(words[5], 0);
  set(words[6], 0);
}
static_assert(offsetof(TraceRecord, copies) % 8 == 0 &&
              offsetof(TraceRecord, name) == offsetof(TraceRecord, copies) + 4);

/// The state of this thread.
struct ThreadState {
  Span* innermost = nullptr;
  std::int64_t pid = 0;  // process for which `id` is valid: a forked child's first thread has another ID
  std::uint32_t id = 0;
};
// The variable is small enough for the static TLS of every program, and is accessed without a call.
[[gnu::tls_model("initial-exec")]] thread_local constinit ThreadState this_thread;

std::uint32_t thread_number(ThreadState& thread, std::int64_t pid) noexcept {
  if (thread.pid != pid) {
    thread.pid = pid;
    thread.id = os::thread_id();
  }
  return thread.id;
}

TraceHeader own_header() {
  TraceHeader header{};
  std::ranges::copy(magic, header.magic.begin());
  header.version = version;
  header.record_bytes = sizeof(TraceRecord);
  header.capacity = ring_records;
  header.wall_clock = static_cast<std::int64_t>(os::clock_ns(CLOCK_REALTIME) - os::now_ns());
  header.rank = -1;
  put_text(header.identity, os::identity_text(os::own_identity()));
  return header;
}

std::string new_path(const std::string& directory) {
  if (!os::file_status(directory, os::Links::followed)) os::make_directory(directory);
  const os::ProcessIdentity own = os::own_identity();
  return fmt::format("{}/{}-{}-{}{}", directory, own.host, own.pid, os::random_hex(4), file_suffix);
}

}  // namespace

/// The file to which one process writes its records. It is mapped, so that no record is lost if the process dies. It
/// grows in pieces whose space is allocated before they are touched, so that a full disk causes an error and not
/// SIGBUS.
class TraceFile {
 public:
  /// Creates a file in the directory, which is created if it does not exist. Throws Error.
  TraceFile(const std::string& directory, const TraceHeader& header) : file_(new_path(directory)) {
    pieces_[0] = file_.grow(piece_records * sizeof(TraceRecord));
    this->header() = header;
  }

  /// Returns a zeroed record with its number; null if the file cannot grow any more. Any thread.
  TraceRecord* claim(std::uint32_t& number) noexcept {
    if (has_stopped()) return nullptr;
    const std::uint64_t at = next_.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t piece = at / piece_records;
    std::byte* begin = piece < pieces_.size() ? pieces_[piece].load(std::memory_order_acquire) : nullptr;
    if (begin == nullptr && (begin = grow(piece)) == nullptr) return nullptr;
    number = static_cast<std::uint32_t>(at - first_record + 1);
    return reinterpret_cast<TraceRecord*>(begin) + at % piece_records;
  }

  [[nodiscard]] TraceHeader& header() noexcept { return *reinterpret_cast<TraceHeader*>(pieces_[0].load()); }
  [[nodiscard]] bool has_stopped() const noexcept { return has_stopped_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t piece_records = 8192;
  static constexpr std::uint64_t first_record = sizeof(TraceHeader) / sizeof(TraceRecord);

  std::byte* grow(std::uint64_t piece) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      if (has_stopped()) return nullptr;
      if (piece >= pieces_.size())
        throw Error(ErrorKind::out_of_space, fmt::format("{}: growing: the trace file has reached its largest number "
                                                         "of records. Trace a shorter part of the job",
                                                         in_quotes(file_.path())));
      for (std::uint64_t at = 0; at <= piece; ++at)
        if (pieces_[at] == nullptr) pieces_[at] = file_.grow(piece_records * sizeof(TraceRecord));
      return pieces_[piece];
    } catch (const std::exception& error) {
      has_stopped_ = true;
      log(LogLevel::warning, fmt::format("tracing stops, the job continues: {}", error.what()));
      return nullptr;
    }
  }

  os::GrowingFile file_;
  ForkMutex mutex_;
  std::atomic<std::uint64_t> next_{first_record};
  std::atomic<bool> has_stopped_{false};
  std::array<std::atomic<std::byte*>, 4096> pieces_{};
};

/// The recorder of one process. It is created at the first record and never destroyed, because threads may record until
/// the process ends.
class Recorder {
 public:
  /// Returns the recorder of this process; null if there is no memory for it. A forked child has its own.
  static Recorder* own() noexcept {
    Recorder* const known = current().load(std::memory_order_acquire);
    if (known != nullptr && known->pid_ == os::process_id()) return known;
    return make(known);
  }

  [[nodiscard]] TraceFile* file() const noexcept { return file_.load(std::memory_order_acquire); }
  [[nodiscard]] std::int64_t pid() const noexcept { return pid_; }

  /// Returns a number whose place in the ring is free. It skips places of operations that have not ended, up to a
  /// limit.
  std::uint64_t claim() noexcept {
    constexpr int patience = 8;
    TraceHeader& header = *ring();
    std::uint64_t number = 0;
    for (int turn = 0; turn < patience; ++turn) {
      number = Word(header.claimed).fetch_add(1, std::memory_order_relaxed) + 1;
      TraceRecord& there = at(place_of(number));
      if (Word(there.number).load(std::memory_order_relaxed) == 0 ||
          Word(there.end).load(std::memory_order_acquire) != 0)
        break;
    }
    return number;
  }
  [[nodiscard]] TraceRecord& at(std::uint64_t place) const noexcept {
    return reinterpret_cast<TraceRecord*>(ring() + 1)[place];
  }
  static std::uint64_t place_of(std::uint64_t number) noexcept { return (number - 1) % ring_records; }

  void join(std::span<const std::byte, 16> job, int rank, int size) noexcept {
    const std::lock_guard lock(mutex_);
    if (size <= header_.size) return;
    header_.rank = rank;
    header_.size = size;
    std::ranges::copy(job, header_.job.begin());
    tell(*ring());
    if (TraceFile* const its = file()) tell(its->header());
  }

  void move_ring(std::byte* memory) noexcept {
    const std::lock_guard lock(mutex_);
    std::memcpy(memory, static_cast<const void*>(ring()), ring_bytes);
    ring_.store(reinterpret_cast<TraceHeader*>(memory), std::memory_order_release);
  }

 private:
  static std::atomic<Recorder*>& current() noexcept {
    static constinit std::atomic<Recorder*> recorder{nullptr};
    return recorder;
  }
  static Recorder* make(Recorder* known) noexcept {
    try {
      auto made = std::make_unique<Recorder>();
      if (current().compare_exchange_strong(known, made.get(), std::memory_order_acq_rel)) {
        made->open_file();
        return made.release();
      }
      return known;
    } catch (const std::exception&) {
      return nullptr;
    }
  }

 public:
  Recorder() : own_ring_(std::make_unique<OwnRing>()), ring_(&own_ring_->header) { *ring() = header_; }

 private:
  /// The ring until keep_ring_in() provides memory that other processes can read.
  struct OwnRing {
    TraceHeader header{};
    std::array<TraceRecord, ring_records> records{};
  };

  [[nodiscard]] TraceHeader* ring() const noexcept { return ring_.load(std::memory_order_acquire); }
  void tell(TraceHeader& header) const noexcept {
    header.rank = header_.rank;
    header.size = header_.size;
    header.job = header_.job;
  }
  void open_file() noexcept {
    try {
      const auto directory = os::environment("MUSTER_TRACE");
      if (!directory) return;
      TraceHeader header = header_;
      header.capacity = 0;
      file_.store(std::make_unique<TraceFile>(*directory, header).release(), std::memory_order_release);
    } catch (const std::exception& error) {
      log(LogLevel::warning, std::string("MUSTER_TRACE: tracing is off, the job continues: ") + error.what());
    }
  }

  std::int64_t pid_ = os::process_id();
  TraceHeader header_ = own_header();
  std::unique_ptr<OwnRing> own_ring_;
  std::atomic<TraceHeader*> ring_;
  std::atomic<TraceFile*> file_{nullptr};
  ForkMutex mutex_;
};

Span::Span(SpanKind kind, std::string_view name, OperationId operation, int peer) noexcept {
  begin(kind, name, operation, peer);
}

Span::Span(Outermost, SpanKind kind, std::string_view name, Operations& operations) noexcept {
  if (is_outermost()) begin(kind, name, operations.next(), -1);
}

Span::Span(Outermost, SpanKind kind, std::string_view name, OperationId operation, int peer) noexcept {
  if (is_outermost()) begin(kind, name, operation, peer);
}

bool Span::is_outermost() noexcept {
  return this_thread.innermost == nullptr || !this_thread.innermost->is_library_;
}

void Span::begin(SpanKind kind, std::string_view name, OperationId operation, int peer) noexcept {
  Recorder* const recorder = Recorder::own();
  if (recorder == nullptr) return;
  recorder_ = recorder;
  exceptions_ = std::uncaught_exceptions();
  ThreadState& thread = this_thread;
  outer_ = thread.innermost;
  // A forked child starts without outer spans.
  if (outer_ != nullptr && outer_->recorder_ != recorder) outer_ = nullptr;
  thread.innermost = this;
  std::uint32_t parent = 0;
  if (outer_ != nullptr) {
    parent = outer_->file_number_;
    depth_ = static_cast<std::uint8_t>(std::min(outer_->depth_ + 1, 255));
  }
  is_library_ = kind != SpanKind::program || (outer_ != nullptr && outer_->is_library_);
  TraceFile* const file = recorder->file();
  const bool is_traced = file != nullptr && (in_file_ = file->claim(file_number_)) != nullptr;
  const std::uint64_t now = is_traced ? os::now_ns() : os::tick_ns();
  const std::uint32_t number_of_thread = thread_number(thread, recorder->pid());
  const auto write = [&](TraceRecord& record, std::uint64_t number) {
    set(record.number, 0);
    set(record.begin, now);
    set(record.end, 0);
    set(record.bytes, 0);
    set(record.done, 0);
    set(record.group, operation.group);
    set(record.operation, operation.number);
    set(record.parent, parent);
    set(record.thread, number_of_thread);
    set(record.page_faults, 0);
    set(record.peer, peer);
    set_name(record, static_cast<std::uint32_t>(depth_) << 8 | static_cast<std::uint32_t>(kind) << 16, name);
    Word(record.number).store(number, std::memory_order_release);
  };
  if (is_traced) write(*in_file_, file_number_);
  number_ = recorder->claim();
  place_ = Recorder::place_of(number_);
  write(recorder->at(place_), number_);
}

bool Span::is_recorded() const noexcept {
  return recorder_ != nullptr && recorder_->pid() == os::process_id();
}

TraceRecord* Span::in_ring() const noexcept {
  TraceRecord& record = recorder_->at(place_);
  return Word(record.number).load(std::memory_order_relaxed) == number_ ? &record : nullptr;
}

Span::~Span() {
  if (recorder_ == nullptr) return;
  // Spans of a program may end in any order, so this one need not be the innermost.
  Span** link = &this_thread.innermost;
  while (*link != nullptr && *link != this) link = &(*link)->outer_;
  if (*link != nullptr) *link = outer_;
  if (!is_recorded()) return;
  const bool has_failed = std::uncaught_exceptions() > exceptions_;
  const auto finish = [&](TraceRecord& record, std::uint64_t end) {
    set(record.bytes, bytes_);
    set(record.failed, has_failed ? 1 : 0);
    if (!route_.empty()) set_detail(record, route_);
    Word(record.end).store(end, std::memory_order_release);
  };
  const std::uint64_t end = in_file_ != nullptr ? os::now_ns() : os::tick_ns();
  if (TraceRecord* const record = in_ring()) finish(*record, end);
  if (in_file_ != nullptr) finish(*in_file_, end);
}

OperationParts::OperationParts(const Span& span, std::uint64_t begin) noexcept : span_(span), last_(begin) {
  if (span.in_file_ == nullptr) return;
  record_ = {};
  record_.begin = begin;
}

void OperationParts::end(std::string_view name, std::uint64_t now, std::uint64_t bytes, std::uint64_t copies,
                         std::uint64_t page_faults) noexcept {
  if (!span_.is_recorded()) return;
  if (TraceRecord* const record = span_.in_ring()) set_detail(*record, name);
  if (span_.in_file_ == nullptr || record_.count == PartsRecord::most) return;
  put_text(record_.names[record_.count], name);
  record_.nanoseconds[record_.count] = now - last_;
  last_ = now;
  if (bytes != 0) {
    record_.bytes = bytes;
    record_.page_faults = static_cast<std::uint32_t>(page_faults);
    record_.copies = static_cast<std::uint8_t>(std::min<std::uint64_t>(copies, 255));
    record_.moving = static_cast<std::uint8_t>(record_.count);
  }
  ++record_.count;
}

OperationParts::~OperationParts() {
  if (span_.in_file_ == nullptr || !span_.is_recorded() || record_.count == 0) return;
  std::uint32_t number = 0;
  TraceRecord* const target = span_.recorder_->file()->claim(number);
  if (target == nullptr) return;
  record_.parent = span_.file_number_;
  record_.depth = static_cast<std::uint8_t>(std::min(span_.depth_ + 1, 255));
  record_.kind = SpanKind::parts;
  record_.thread = span_.in_file_->thread;
  std::memcpy(static_cast<void*>(target), &record_, sizeof record_);
  Word(target->number).store(number, std::memory_order_release);
}

void Span::has_moved(std::uint64_t bytes) noexcept {
  if (!is_recorded()) return;
  if (TraceRecord* const record = in_ring()) set(record->done, bytes);
  if (in_file_ != nullptr) in_file_->done = bytes;
}

void join(std::span<const std::byte, 16> job, int rank, int size) noexcept {
  if (Recorder* const recorder = Recorder::own()) recorder->join(job, rank, size);
}

void keep_ring_in(std::byte* memory) noexcept {
  if (Recorder* const recorder = Recorder::own()) recorder->move_ring(memory);
}

}  // namespace muster::trace

namespace muster {

TraceSpan::TraceSpan(std::string_view name) noexcept {
  static_assert(sizeof(trace::Span) <= sizeof span_ && alignof(trace::Span) <= 8);
  new (span_.data()) trace::Span(trace::SpanKind::program, name);
}

TraceSpan::~TraceSpan() {
  std::launder(reinterpret_cast<trace::Span*>(span_.data()))->~Span();
}

void TraceSpan::add_bytes(std::uint64_t bytes) noexcept {
  std::launder(reinterpret_cast<trace::Span*>(span_.data()))->add_bytes(bytes);
}

bool is_tracing() noexcept {
  const trace::Recorder* const recorder = trace::Recorder::own();
  const trace::TraceFile* const file = recorder == nullptr ? nullptr : recorder->file();
  return file != nullptr && !file->has_stopped();
}

}  // namespace muster
