// SPDX-License-Identifier: Apache-2.0
#pragma once
// Command lines of the bench. One source file includes CLI11, which takes longer to compile than a bench.

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

  /// `value` keeps what it has if the option is not given. A list's elements stand between commas, or are arguments of
  /// their own. options.cpp lists the kinds of values.
  template <class Value>
  void add(const char* name, Value& value, const char* help = "");
  template <class Value>
  void add(const char* name, Value& value, const char* help, Range range);
  template <class Value>
  void add(const char* name, Value& value, const char* help, const std::vector<std::string>& choices);

  /// Ends the process if help is asked for, or after saying what is wrong.
  void parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace bench
