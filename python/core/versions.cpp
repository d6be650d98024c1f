// SPDX-License-Identifier: Apache-2.0
// Versions of weights: publishing from files and from memory, pulling, and the log.

#include <fmt/core.h>

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/publish.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/live_parts.hpp"
#include "python/core/long_work.hpp"
#include "python/core/options.hpp"
#include "python/core/waiting.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/inspect/version_reports.hpp"

namespace muster::python {
namespace {

/// Returns make(), which converts Python objects. If it fails on a rank, all ranks raise its error, and the group
/// remains usable.
template <class Make>
auto agreed(Group& group, const char* phase, const Make& make) -> decltype(make()) {
  std::optional<decltype(make())> made;
  std::optional<Error> failure;
  try {
    made.emplace(converted(make));
  } catch (const Error& error) {
    failure = error;
  }
  without_gil([&] { agree(group, failure, phase); });
  return std::move(*made);
}

/// MPI may be restricted to the main thread.
std::launch place_of(const Group& group) {
  return group.kind() == "mpi" ? std::launch::deferred : std::launch::async;
}

PublisherOptions publisher_options_of(const Dict& given) {
  const Options options(given);
  PublisherOptions made;
  std::string encoding(to_string(made.encoding));
  options.take("base", made.base);
  options.take("plan", made.plan);
  options.take("source_layout", made.source_layout);
  options.take("encoding", encoding);
  options.take("full_every", made.full_every);
  options.take("base_copy", made.base_copy);
  options.take("keep", made.keep);
  options.take("keep_for", made.keep_for);
  options.take("stale_after", made.stale_after);
  options.take("check_replicas", made.check_replicas);
  if (encoding != to_string(DeltaEncoding::exclusive_or) && encoding != to_string(DeltaEncoding::overwrite))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("encoding: unknown value '{}' (expected 'xor' or 'overwrite')", encoding));
  made.encoding =
      encoding == to_string(DeltaEncoding::overwrite) ? DeltaEncoding::overwrite : DeltaEncoding::exclusive_or;
  return made;
}

PublishOptions publish_options_of(const Dict& given) {
  const Options options(given);
  PublishOptions made;
  options.take("full", made.full);
  options.take("version", made.version);
  return made;
}

/// The other ranks know only the number of the version.
nb::object report_of(const PublishReport& report, const Group& group) {
  if (group.rank() == 0) return object_of(inspect::publish_tree(report));
  return object_of(Config::object({{"version", report.version}}));
}

/// Publishes with the options of a version: publish(options).
template <class Publish>
nb::object published(const Group& group, PublishOptions options, nb::handle progress, const Publish& publish) {
  const auto work = [&](const ProgressCallback& tell, std::stop_token stop) {
    options.progress = tell;
    options.stop = std::move(stop);
    return publish(std::as_const(options));
  };
  return report_of(long_work(progress, work, place_of(group)), group);
}

/// A publisher, until it is closed. It keeps its group alive.
class OpenPublisher {
 public:
  OpenPublisher(const std::string& source, std::shared_ptr<Group> group, const Dict& given) : group_(std::move(group)) {
    PublisherOptions options = agreed(*group_, "publisher: arguments", [&] { return publisher_options_of(given); });
    without_gil([&] { publisher_ = std::make_shared<Publisher>(source, std::move(options), *group_); });
  }
  OpenPublisher& operator=(OpenPublisher&&) = delete;
  ~OpenPublisher() { close(); }

  nb::object publish(nb::handle tensors, const Dict& given, nb::handle progress) {
    // Another thread may close this object meanwhile.
    const std::shared_ptr<Group> group = group_;
    const std::shared_ptr<Publisher> publisher = publisher_;
    if (!publisher) throw Error(ErrorKind::invalid_argument, "Publisher: it is closed. Make another one");
    struct Arguments {
      PublishOptions options;
      std::vector<TensorPart> parts;
    };
    Arguments arguments = agreed(*group, "publish: arguments", [&] {
      return Arguments{publish_options_of(given), live_parts_of(tensors)};
    });
    return published(*group, std::move(arguments.options), progress,
                     [&](const PublishOptions& options) { return publisher->publish(arguments.parts, options); });
  }

  void close() {
    std::shared_ptr<Publisher> publisher = std::move(publisher_);
    std::shared_ptr<Group> group = std::move(group_);
    without_gil([&] {
      publisher.reset();
      group.reset();
    });
  }

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<Publisher> publisher_;
};

nb::object publish_files(const std::string& model, const std::string& source, std::shared_ptr<Group> group,
                         const Dict& given, const Dict& given_version, nb::handle progress) {
  struct Arguments {
    PublisherOptions publisher;
    PublishOptions version;
  };
  Arguments arguments = agreed(*group, "publish: arguments", [&] {
    return Arguments{publisher_options_of(given), publish_options_of(given_version)};
  });
  return published(*group, std::move(arguments.version), progress, [&](const PublishOptions& options) {
    return publish_version(model, source, arguments.publisher, *group, options);
  });
}

std::chrono::milliseconds milliseconds_of(double seconds, const char* name) {
  // A year, which is far from the limits of a clock.
  constexpr double longest = 365.0 * 24 * 3600;
  if (!(seconds >= 0))
    throw Error(ErrorKind::invalid_argument, fmt::format("{}: {} is not a time of at least 0 s", name, seconds));
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(std::min(seconds, longest)));
}

nb::object pull(const std::string& source, const std::string& local, const Dict& given, nb::handle progress) {
  const Options options(given);
  PullOptions made;
  double wait = 0;
  double lock_timeout = std::chrono::duration<double>(made.lock_timeout).count();
  std::string durability = "boot";
  options.take("base", made.base);
  options.take("version", made.version);
  options.take("wait", wait);
  options.take("lock_timeout", lock_timeout);
  options.take("durability", durability);
  made.wait = milliseconds_of(wait, "wait");
  made.lock_timeout = milliseconds_of(lock_timeout, "lock_timeout");
  if (durability != "boot" && durability != "synced")
    throw Error(ErrorKind::invalid_argument,
                fmt::format("durability: unknown value '{}' (expected 'boot' or 'synced')", durability));
  made.durability = durability == "synced" ? PullDurability::synced : PullDurability::boot;
  const PullReport report = long_work(progress, [&](const ProgressCallback& tell, std::stop_token stop) {
    made.progress = tell;
    made.stop = std::move(stop);
    return pull_version(source, local, made);
  });
  return object_of(inspect::pull_tree(report, local));
}

nb::object log_of(const std::string& source, const Dict& given, nb::handle progress) {
  const Options options(given);
  LogOptions made;
  options.take("base", made.base);
  options.take("local", made.local);
  options.take("verify", made.verify);
  const VersionLog log = long_work(progress, [&](const ProgressCallback& tell, std::stop_token stop) {
    made.progress = tell;
    made.stop = std::move(stop);
    return read_versions(source, made);
  });
  return object_of(inspect::log_tree(log, made.verify, std::chrono::system_clock::now()));
}

}  // namespace

void bind_versions(nb::module_& module) {
  nb::class_<OpenPublisher>(module, "OpenPublisher", "The publisher of a muster.Publisher.")
      .def(nb::init<const std::string&, std::shared_ptr<Group>, const Dict&>())
      .def("publish", &OpenPublisher::publish, nb::arg("tensors").none(), nb::arg("options"),
           nb::arg("progress").none(), "Publishes the tensors of a state dict as the next version.")
      .def("close", &OpenPublisher::close, "Releases the memory of the publisher. It may be called again.");
  module.def("publish_files", publish_files, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("pull_version", pull, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("read_versions", log_of, nb::arg(), nb::arg(), nb::arg().none());
}

}  // namespace muster::python
