// SPDX-License-Identifier: Apache-2.0
#pragma once
// Command-line options of the benches. Only one source file includes CLI11, which takes longer to compile than a bench.

#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace bench {

struct Range {
  double least = 1;
  double most = 1e15;
};

class Options {
 public:
  explicit Options(const char* about);
  ~Options();
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  /// Adds an option. If it is not given, `value` is unchanged. The elements of a list are separated by commas, or are
  /// separate arguments. options.cpp lists the supported types.
  template <class Value>
  void add(const char* name, Value& value, const char* help = "");
  template <class Value>
  void add(const char* name, Value& value, const char* help, Range range);
  template <class Value>
  void add(const char* name, Value& value, const char* help, const std::vector<std::string>& choices);

  /// Exits after printing the help, or after reporting an error.
  void parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace bench
