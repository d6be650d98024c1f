// SPDX-License-Identifier: Apache-2.0
#include "src/launch/call.hpp"

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "muster/config.hpp"
#include "muster/state.hpp"
#include "src/base/written.hpp"
#include "src/launch/ranks.hpp"

namespace muster::launch {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Texts = std::vector<std::string>;

/// Every value that travels, by its name.
template <class Call, class Field>
void each_field(Call& call, const Field& field) {
  field("function", call.function);
  field("command", call.command);
  field("arguments", call.options.arguments);
  field("setup", call.options.setup);
  field("rank_offset", call.options.rank_offset);
  field("program", call.options.program);
  auto& config = call.config;
  field("world_size", config.world_size);
  field("local_world_size", config.local_world_size);
  field("master_addr", config.master_addr);
  field("master_port", config.master_port);
  field("init_method", config.init_method);
  field("model_parallelism", config.model_parallelism);
  field("pipeline_parallelism", config.pipeline_parallelism);
  field("backend", config.backend);
  field("model_parallel_backend", config.model_parallel_backend);
  field("pipeline_parallel_backend", config.pipeline_parallel_backend);
  field("data_parallel_backend", config.data_parallel_backend);
  field("launch_method", config.launch_method);
  auto& launch = call.options.launch;
  field("output", launch.output);
  field("log_directory", launch.log_directory);
  field("tee", launch.tee);
  field("grace", launch.grace);
  field("kill_after", launch.kill_after);
  field("timeout", launch.timeout);
  field("job", launch.job);
}

template <class Value>
Config written(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return static_cast<int>(value);
  else
    return value;
}
Config written(const Milliseconds& value) {
  return value.count();
}
Config written(const Texts& value) {
  return ConfigArray(value.begin(), value.end());
}
template <class Value>
Config written(const std::optional<Value>& value) {
  return value ? written(*value) : Config();
}

template <class Value>
void read(const Config& from, Value& value) {
  if constexpr (std::is_enum_v<Value>)
    value = static_cast<Value>(from.as<int>());
  else
    value = from.as<Value>();
}
void read(const Config& from, Milliseconds& value) {
  value = Milliseconds(from.as_int());
}
void read(const Config& from, Texts& value) {
  for (const Config& text : from.as_array()) value.push_back(text.as_string());
}
template <class Value>
void read(const Config& from, std::optional<Value>& value) {
  if (!from.is_null()) read(from, value.emplace());
}

struct Failure {
  std::uint32_t is_there = 0;
  WrittenError<24000> error;
};

}  // namespace

void tell_failure(const os::Fd& report, const Error& error) noexcept {
  Failure failure;
  failure.is_there = 1;
  failure.error.put(error);
  // A pipe holds it, and nobody else writes here.
  [[maybe_unused]] const ssize_t written = ::write(report.get(), &failure, sizeof failure);
}

std::optional<Error> read_failure(const os::Fd& report) {
  Failure failure;
  const auto bytes = std::as_writable_bytes(std::span(&failure, 1));
  std::size_t got = 0;
  while (got < bytes.size()) {
    const ssize_t more = read_some(report.get(), bytes.data() + got, bytes.size() - got);
    if (more <= 0) break;
    got += static_cast<std::size_t>(more);
  }
  if (got != bytes.size() || failure.is_there == 0) return std::nullopt;
  return failure.error.get();
}

std::string to_text(const CallText& call) {
  Config tree = Config::object();
  each_field(call, [&tree](const char* name, const auto& value) { tree[name] = written(value); });
  return to_json(tree);
}

CallText parse_call(std::string_view text) {
  const Config tree = parse_json(text);
  CallText call;
  each_field(call, [&tree](const char* name, auto& value) { read(tree.at(name), value); });
  return call;
}

ExecArguments program_of(const CallText& call, const ExecArguments::Variables& variables) {
  const std::vector<std::string>& program = call.options.program;
  return program.empty() ? ExecArguments::own_program(variables) : ExecArguments(program, variables);
}

}  // namespace muster::launch
