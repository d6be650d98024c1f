// SPDX-License-Identifier: Apache-2.0
// muster-demo-model: writes a model for trials, the same every time.

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>

#include "src/inspect/demo_model.hpp"
#include "src/inspect/reports.hpp"

int main(int argc, char** argv) {
  namespace inspect = muster::inspect;
  CLI::App app{"Makes a Llama-like model in bf16 with HuggingFace's names, the same every time"};
  std::string directory;
  std::uint64_t megabytes = 200;
  std::uint64_t max_shard_size = 0;
  app.add_option("directory", directory, "The directory to make")->required()->type_name("DIR");
  app.add_option("--megabytes", megabytes, "About how large")->capture_default_str()->check(CLI::Range(1, 1'000'000));
  app.add_option_function<std::string>(
      "--max-shard-size", [&](const std::string& text) { max_shard_size = inspect::parse_size(text); },
      "Bytes of tensors in one file (default: about a third of the model)");
  try {
    CLI11_PARSE(app, argc, argv);
    const inspect::LlamaSizes sizes = inspect::llama_sizes(megabytes);
    const inspect::DemoModel model = inspect::llama_model(sizes);
    if (max_shard_size == 0) max_shard_size = megabytes * 1'000'000 / 3 + 1;
    const std::uint64_t bytes = inspect::write_demo_model(model, directory, max_shard_size);
    fmt::print("{}: {} layers, hidden size {}, {} heads, {} key-value heads, {} tensors, {:.1f} MB of bf16\n",
               directory, sizes.layers, sizes.hidden, sizes.heads, sizes.key_value_heads, model.tensors.size(),
               static_cast<double>(bytes) / 1e6);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "muster-demo-model: %s\n", error.what());
    return 2;
  }
}
