// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/options.hpp"

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

namespace bench {
namespace {

template <class Value>
CLI::Option* add_to(CLI::App& app, const char* name, Value& value, const char* help) {
  if constexpr (std::is_same_v<Value, bool>)
    return app.add_flag(name, value, help);
  else if constexpr (CLI::detail::is_mutable_container<Value>::value)
    return app.add_option(name, value, help)->delimiter(',');
  else
    return app.add_option(name, value, help);
}

}  // namespace

Options::Options(const char* about) : app_(std::make_unique<CLI::App>(about)) {}
Options::~Options() = default;

template <class Value>
void Options::add(const char* name, Value& value, const char* help) {
  add_to(*app_, name, value, help);
}

template <class Value>
void Options::add(const char* name, Value& value, const char* help, Range range) {
  add_to(*app_, name, value, help)->check(CLI::Range(range.least, range.most));
}

template <class Value>
void Options::add(const char* name, Value& value, const char* help, const std::vector<std::string>& choices) {
  add_to(*app_, name, value, help)->check(CLI::IsMember(choices));
}

void Options::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app_->exit(error));
  }
}

template void Options::add(const char*, bool&, const char*);
template void Options::add(const char*, int&, const char*);
template void Options::add(const char*, double&, const char*);
template void Options::add(const char*, std::string&, const char*);
template void Options::add(const char*, std::uint64_t&, const char*);
template void Options::add(const char*, std::vector<int>&, const char*);
template void Options::add(const char*, std::vector<std::uint64_t>&, const char*);
template void Options::add(const char*, int&, const char*, Range);
template void Options::add(const char*, std::uint64_t&, const char*, Range);
template void Options::add(const char*, std::vector<int>&, const char*, Range);
template void Options::add(const char*, std::vector<std::uint64_t>&, const char*, Range);
template void Options::add(const char*, std::string&, const char*, const std::vector<std::string>&);
template void Options::add(const char*, std::vector<std::string>&, const char*, const std::vector<std::string>&);

}  // namespace bench
