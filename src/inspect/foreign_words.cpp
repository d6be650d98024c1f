// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/foreign_words.hpp"

#include <fmt/core.h>

#include <array>
#include <utility>

#include "src/inspect/printable.hpp"

namespace muster::inspect {
namespace {

using hdf5::IssueCode;

// Of HDF5's registry: what is met in files of weights and measurements.
constexpr std::array<std::pair<std::uint64_t, std::string_view>, 14> known_filters = {{
    {4, "szip"},
    {5, "n-bit"},
    {6, "scale-offset"},
    {305, "lzo"},
    {307, "bzip2"},
    {32000, "lzf"},
    {32001, "blosc"},
    {32004, "lz4"},
    {32008, "bitshuffle"},
    {32013, "zfp"},
    {32017, "sz"},
    {32023, "sz3"},
    {32026, "blosc2"},
    {32028, "sperr"},
}};

/// " to \"words\"", or nothing.
std::string told(std::string_view before, std::string_view words) {
  return words.empty() ? std::string() : fmt::format("{}\"{}\"", before, printable(words));
}

std::string because(std::string_view words) {
  return words.empty() ? std::string() : ": " + printable(words);
}

}  // namespace

std::string filter_name(std::uint64_t id, std::string_view name_in_file) {
  for (const auto& [known, name] : known_filters)
    if (known == id) return fmt::format("{} ({})", name, id);
  return fmt::format("the filter {}{}", id, told(" ", name_in_file));
}

std::string issue_words(IssueCode code, std::uint64_t number, std::string_view words) {
  switch (code) {
    case IssueCode::soft_link:
      return fmt::format("a soft link{}: not followed", told(" to ", words));
    case IssueCode::external_link:
      return fmt::format("a link to another file{}: not followed", told(", ", words));
    case IssueCode::user_link:
      return fmt::format("a link of the private kind {}: not followed", number);
    case IssueCode::second_name:
      return fmt::format("another name of {}{}: {}", number == 1 ? "the group" : "the dataset",
                         words.empty() ? " at the root" : told(" ", words),
                         number == 1 ? "listed once, or the links would go in circles" : "listed once");
    case IssueCode::too_deep:
      return fmt::format("a group that is more than {} groups deep: not entered", number);
    case IssueCode::too_many_objects:
      return fmt::format("more than {} names: the rest is not listed", number);
    case IssueCode::group_damaged:
      return fmt::format("a damaged group, libhdf5 cannot list all of it{}", because(words));
    case IssueCode::object_damaged:
      return fmt::format("damaged, libhdf5 cannot open it{}", because(words));
    case IssueCode::named_type:
      return "a named datatype: it has no elements";
    case IssueCode::object_kind:
      return fmt::format("an object of the unknown kind {}", number);
    case IssueCode::virtual_dataset:
      return "a virtual dataset: its elements are in other files or datasets, which are not opened";
    case IssueCode::external_storage:
      return number == 1 ? std::string("its elements are in another file, which is not opened")
                         : fmt::format("its elements are in {} other files, which are not opened", number);
    case IssueCode::element_type:
      return fmt::format("no tensor: its elements are {}", printable(words));
    case IssueCode::dataspace:
      return fmt::format("no tensor: {}", printable(words));
    case IssueCode::filter:
      return fmt::format("went through {}, which is not undone here: h5repack -f GZIP=1 makes it readable",
                         filter_name(number, words));
    case IssueCode::chunk_bytes:
      return number == ~std::uint64_t{0} ? std::string("its chunks are larger than any memory")
                                         : fmt::format("its chunks have {} bytes, more than the {} that are read",
                                                       number, hdf5::most_chunk_bytes);
    case IssueCode::chunk_count:
      return fmt::format("it is in {} chunks; more than {} in a file are not read", number, hdf5::most_chunks);
    case IssueCode::dataset_damaged:
      return fmt::format("a damaged dataset{}", because(words));
    case IssueCode::name_length:
      return fmt::format("a name of {} bytes makes a path of more than {}: not followed", number,
                         hdf5::most_path_bytes);
    case IssueCode::attributes_skipped:
      return fmt::format("{} of its attributes are neither text nor one number: not shown", number);
    case IssueCode::attribute_count:
      return fmt::format("more than {} attributes: the rest is not shown", number);
    case IssueCode::text_length:
      return fmt::format("a text that is too long to be shown{}", told(", the attribute ", words));
    case IssueCode::text_count:
      return fmt::format("more than {} objects have attributes or text: those of the rest are not shown", number);
    case IssueCode::text_damaged:
      return fmt::format("an attribute or text that cannot be read{}", because(words));
    case IssueCode::layout:
      return fmt::format("its elements are laid out in the unknown way {}", number);
  }
  return fmt::format("something that has the unknown code {}", static_cast<unsigned>(code));
}

}  // namespace muster::inspect
