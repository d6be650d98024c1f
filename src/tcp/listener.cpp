// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/listener.hpp"

#include <fmt/core.h>

#include <boost/asio/buffer.hpp>
#include <cerrno>
#include <utility>

#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::tcp {
namespace {

constexpr std::chrono::seconds longest_hello{10};
// In addition to the ranks of the job.
constexpr std::size_t most_strangers = 64;
// If no descriptor is free, wait until other connections end.
constexpr std::chrono::milliseconds pause_without_descriptors{100};
constexpr std::chrono::seconds longest_block{1};

}  // namespace

Listener::Listener(asio::io_context& io, Acceptor acceptor, const Token& token, int self, int size, Accepted accepted)
    : io_(io),
      acceptor_(std::move(acceptor)),
      pause_(io),
      token_(token),
      self_(self),
      size_(size),
      accepted_(std::move(accepted)) {
  error_code ignored;
  acceptor_.non_blocking(true, ignored);
  wait();
}

void Listener::close() {
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
  for (const GuestPointer& guest : std::exchange(guests_, {})) guest->is_gone = true;
}

void Listener::give_up_sockets() noexcept {
  if (acceptor_.is_open()) give_up(acceptor_.native_handle());
  for (const GuestPointer& guest : guests_)
    if (guest->socket.is_open()) give_up(guest->socket.native_handle());
}

void Listener::wait() {
  acceptor_.async_wait(Acceptor::wait_read, [this](const error_code& failure) {
    if (!failure) take_in();
  });
}

void Listener::take_in() {
  for (;;) {
    Socket socket = accept_one(acceptor_, io_);
    if (!socket.is_open()) break;
    const auto guest = std::make_shared<PendingGuest>(std::move(socket));
    guests_.push_back(guest);
    error_code ignored;
    guest->socket.non_blocking(true, ignored);
    if (guests_.size() > most_strangers + static_cast<std::size_t>(size_))
      drop(GuestPointer(guests_.front()), "too many connections");
    guest->deadline.expires_after(longest_hello);
    guest->deadline.async_wait([this, guest](const error_code& failure) {
      if (!failure && !guest->is_gone) drop(guest, "it sent nothing");
    });
    hear(guest);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED || errno == EINTR) {
    blocked_since_.reset();
    return wait();
  }
  blocked_by_ = errno;
  if (!blocked_since_) blocked_since_ = os::Clock::now();
  pause_.expires_after(pause_without_descriptors);
  pause_.async_wait([this](const error_code& failure) {
    if (!failure) take_in();
  });
}

void Listener::throw_if_blocked() const {
  if (!blocked_since_ || os::Clock::now() - *blocked_since_ < longest_block) return;
  throw os::errno_error("TCP: accepting connections of other ranks", blocked_by_);
}

void Listener::hear(const GuestPointer& guest) {
  while (guest->got < guest->hello.size()) {
    error_code failure;
    const std::size_t got = guest->socket.read_some(
        asio::buffer(guest->hello.data() + guest->got, guest->hello.size() - guest->got), failure);
    if (failure == asio::error::would_block || failure == asio::error::try_again) {
      guest->socket.async_wait(Socket::wait_read, [this, guest](const error_code& why) {
        if (!why && !guest->is_gone) hear(guest);
      });
      return;
    }
    if (failure) return drop(guest, "it closed before it sent a hello");
    guest->got += got;
  }
  const auto rank = parse_hello(guest->hello, token_, self_, size_);
  if (!rank) return drop(guest, "its hello does not belong to a rank of this job");
  forget(guest);
  accepted_(*rank, std::move(guest->socket));
}

void Listener::drop(const GuestPointer& guest, const char* why) {
  error_code failure;
  const Endpoint from = guest->socket.remote_endpoint(failure);
  strangers_(fmt::format("TCP: rank {} closes a connection from {}: {}", self_,
                         failure ? std::string("an unknown address") : text_of(from), why));
  guest->socket.close(failure);
  forget(guest);
}

void Listener::forget(const GuestPointer& guest) {
  guest->is_gone = true;
  guest->deadline.cancel();
  guests_.remove(guest);
}

}  // namespace muster::tcp
