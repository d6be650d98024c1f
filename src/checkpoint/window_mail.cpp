// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly.hpp"

#include <fmt/core.h>

#include <cstring>

#include "muster/error.hpp"

namespace muster {
namespace {

enum class MailKind : std::uint32_t { word = 1, rows = 2, stage = 3 };

/// The header of every message.
struct MailHead {
  MailKind kind = MailKind::word;
  std::uint32_t turn = 0;   // index of the writer's window; for a stage: number of files
  std::uint64_t bytes = 0;  // for a stage
  std::uint32_t is_last = 0;
  std::uint32_t reserved = 0;
};

template <class T>
T head_of(std::span<const std::byte> bytes) {
  T head;
  if (bytes.size() < sizeof head) throw Error(ErrorKind::corrupt, "a message about windows is too short");
  std::memcpy(&head, bytes.data(), sizeof head);
  return head;
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

[[noreturn]] void refuse_mail(int from) {
  throw Error(ErrorKind::corrupt,
              fmt::format("rank {} sent something else than the part of a window that was due", from), {.rank = from});
}

MailHead take_head(std::span<const std::byte> message, MailKind kind, int from) {
  const auto head = head_of<MailHead>(message);
  if (head.kind != kind) refuse_mail(from);
  return head;
}

/// Copies the rows of a message into a window. Each rectangle is followed by its rows.
void place_rows(std::span<const std::byte> message, std::span<std::byte> window) {
  while (!message.empty()) {
    const auto rows = head_of<merge::Rectangle>(message);
    message = message.subspan(sizeof rows);
    check_extent(0, rows.bytes, rows, message.size());
    check_extent(rows.to, rows.to_stride, rows, window.size());
    for (std::uint64_t row = 0; row < rows.rows; ++row)
      std::memcpy(window.data() + rows.to + row * rows.to_stride, message.data() + row * rows.bytes, rows.bytes);
    message = message.subspan(rows.rows * rows.bytes);
  }
}

}  // namespace

WindowMail::WindowMail(SyncGroup& group, const TensorSource& source, std::uint64_t window_bytes)
    : group_(sync::inside(group)), source_(source), piece_bytes_(piece_bytes(window_bytes)) {}

void WindowMail::contribute(const Step& step) {
  const auto writer = static_cast<int>(step.writer);
  const auto word =
      group_.receive(writer, sizeof(MailHead), {.phase = "export: waiting for a window"}, sync::Subject::exchange);
  if (take_head(word, MailKind::word, writer).turn != step.turn) refuse_mail(writer);
  for (const merge::Rectangle& copy : step.copies) pack(copy, step.turn, writer);
  send_piece(step.turn, writer, true);
}

void WindowMail::collect(const Step& step, std::span<std::byte> window) {
  const MailHead word{.kind = MailKind::word, .turn = step.turn};
  for (const std::uint32_t sender : step.senders)
    group_.send(static_cast<int>(sender), bytes_of(word), {.phase = "export: asking for parts of a window"},
                sync::Subject::exchange);
  for (const std::uint32_t sender : step.senders)
    while (!take_piece(static_cast<int>(sender), step.turn, window)) {
    }
}

void WindowMail::tell_stage(const Stage& stage) {
  const MailHead head{.kind = MailKind::stage, .turn = stage.files, .bytes = stage.bytes};
  group_.send(0, bytes_of(head), {.phase = "export: telling which files are complete"}, sync::Subject::exchange);
}

WindowMail::Stage WindowMail::hear_stage(int from) {
  const auto message = group_.receive(from, sizeof(MailHead), {.phase = "export: waiting for a file to be complete"},
                                      sync::Subject::exchange);
  const MailHead head = take_head(message, MailKind::stage, from);
  return {head.turn, head.bytes};
}

// Packs as many whole rows as fit; a row that is longer than a message is sent in parts.
void WindowMail::pack(const merge::Rectangle& copy, std::uint32_t turn, int writer) {
  const std::uint64_t longest = piece_bytes_;
  for (std::uint64_t row = 0; row < copy.rows;) {
    const std::uint64_t at_once =
        copy.bytes > longest ? 1 : std::min(copy.rows - row, longest / std::max<std::uint64_t>(copy.bytes, 1));
    for (std::uint64_t inside = 0; inside < copy.bytes; inside += longest) {
      merge::Rectangle part = copy;
      part.from += row * copy.from_stride + inside;
      part.to = 0;
      part.bytes = std::min(copy.bytes - inside, longest);
      part.to_stride = part.bytes;
      part.rows = at_once;
      merge::Rectangle head = part;
      head.to = copy.to + row * copy.to_stride + inside;
      head.to_stride = copy.to_stride;
      const std::uint64_t length = part.bytes * part.rows;
      if (piece_.size() > sizeof(MailHead) && piece_.size() + sizeof head + length > sizeof(MailHead) + longest)
        send_piece(turn, writer, false);
      if (piece_.empty()) piece_.resize(sizeof(MailHead));
      const auto opening = bytes_of(head);
      piece_.insert(piece_.end(), opening.begin(), opening.end());
      const std::size_t at = piece_.size();
      piece_.resize(at + length);
      read_rows(source_, static_cast<std::size_t>(part.source), 0, part, std::span(piece_).subspan(at));
    }
    row += at_once;
  }
}

void WindowMail::send_piece(std::uint32_t turn, int writer, bool is_last) {
  const MailHead head{.kind = MailKind::rows, .turn = turn, .is_last = is_last ? 1U : 0U};
  if (piece_.empty()) piece_.resize(sizeof head);
  std::memcpy(piece_.data(), &head, sizeof head);
  group_.send(writer, piece_, {.phase = "export: sending parts of a window"}, sync::Subject::exchange);
  piece_.clear();
  group_.progress();
}

bool WindowMail::take_piece(int from, std::uint32_t turn, std::span<std::byte> window) {
  const std::uint64_t most = sizeof(MailHead) + sizeof(merge::Rectangle) + piece_bytes_;
  const auto message =
      group_.receive(from, most, {.phase = "export: waiting for parts of a window"}, sync::Subject::exchange);
  const MailHead head = take_head(message, MailKind::rows, from);
  if (head.turn != turn) refuse_mail(from);
  place_rows(std::span(message).subspan(sizeof head), window);
  group_.progress();
  return head.is_last != 0;
}

}  // namespace muster
