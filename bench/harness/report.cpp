// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

namespace bench {

namespace {

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else {
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out + '"';
}

std::string list(const std::vector<double>& values) {
  std::string out = "[";
  for (const double value : values) {
    out += fmt::format("{}{:.9g}", out.size() > 1 ? "," : "", value);
  }
  return out + "]";
}

template <class Member>
double median_of(const std::vector<Usage>& usage, Member member) {
  std::vector<double> values;
  values.reserve(usage.size());
  for (const Usage& one : usage) {
    values.push_back(static_cast<double>(one.*member));
  }
  return median(std::move(values));
}

std::string usage_json(const std::vector<Usage>& usage) {
  return fmt::format(R"({{"user":{:.6g},"system":{:.6g},"faults":{:.0f},"switches":{:.0f}}})",
                     median_of(usage, &Usage::user_seconds), median_of(usage, &Usage::system_seconds),
                     median_of(usage, &Usage::page_faults), median_of(usage, &Usage::switches));
}

std::string head(const Case& what, std::string_view series) {
  return fmt::format(R"({{"scenario":{},"series":{},"ranks":{},"bytes":{}{})", in_quotes(what.scenario),
                     in_quotes(series), what.ranks, what.bytes,
                     what.placement.empty() ? "" : R"(,"placement":)" + in_quotes(what.placement));
}

// Each line is one write, because the ranks share standard output.
void put(std::string line) {
  line += "}\n";
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

void print_samples(const Case& what, const std::vector<Samples>& all) {
  for (const Samples& samples : all) {
    put(fmt::format(R"({},"access":{},"read":{},"first_rank":{},"senders":{})", head(what, samples.name),
                    list(samples.access_seconds), list(samples.read_seconds), usage_json(samples.first_usage),
                    usage_json(samples.sender_usage)));
  }
}

void print_times(const Case& what, std::string_view series, const std::vector<double>& seconds) {
  put(fmt::format(R"({},"access":{})", head(what, series), list(seconds)));
}

void print_skipped(const Case& what, std::string_view series, std::string_view reason) {
  put(fmt::format(R"({},"skipped":{})", head(what, series), in_quotes(reason)));
}

void PhaseLog::add(const muster::ExchangeReport& report) {
  for (const muster::PhaseReport& phase : report.phases) {
    auto known = std::find_if(phases_.begin(), phases_.end(), [&](const Phase& p) { return p.name == phase.name; });
    if (known == phases_.end()) {
      known = phases_.insert(phases_.end(), Phase{phase.name, {}, {}, {}});
    }
    known->seconds.push_back(phase.seconds);
    known->faults.push_back(static_cast<double>(phase.page_faults));
    known->last = phase;
  }
  last_ = report;
}

void PhaseLog::print(const Case& what, std::string_view series, int rank) const {
  std::string phases;
  for (const Phase& phase : phases_) {
    phases += fmt::format(R"({}{{"name":{},"seconds":{:.6g},"bytes":{},"copies":{},"faults":{:.0f}}})",
                          phases.empty() ? "" : ",", in_quotes(phase.name), median(phase.seconds), phase.last.bytes,
                          phase.last.copies, median(phase.faults));
  }
  put(fmt::format(R"({},"rank":{},"route":{},"rounds":{},"pool_bytes":{},"phases":[{}])", head(what, series), rank,
                  in_quotes(to_string(last_.route)), last_.rounds, last_.pool_bytes, phases));
}

}  // namespace bench
