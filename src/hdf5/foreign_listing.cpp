// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/foreign_listing.hpp"

#include <array>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>

#include "src/hdf5/descriptor_driver.hpp"
#include "src/hdf5/foreign_id.hpp"
#include "src/hdf5/foreign_types.hpp"

namespace muster::hdf5 {
namespace {

// No tensor is larger than a file can be.
constexpr std::uint64_t most_bytes = std::uint64_t{1} << 62;
constexpr std::size_t longest_target = 4096;
constexpr std::size_t most_to_read = 50'000;

/// a * b, none where that is more than a tensor can have.
std::optional<std::uint64_t> product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result) || result > most_bytes) return std::nullopt;
  return result;
}

herr_t keep_innermost(unsigned /*depth*/, const H5E_error2_t* error, void* words) {
  if (error->desc != nullptr && *error->desc != 0) *static_cast<std::string*>(words) = error->desc;
  return 0;
}

std::string under(const std::string& parent, const char* name) {
  return parent.empty() ? std::string(name) : parent + "/" + name;
}

}  // namespace

std::string last_failure() {
  std::string words;
  // Downward: the last that is told is where it began.
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_innermost, &words);
  H5Eclear2(H5E_DEFAULT);
  return words.empty() ? "no reason given" : words;
}

/// What a visit of a group's links knows. Exceptions must not fly through libhdf5: they wait here.
struct ForeignListing::Here {
  ForeignListing* listing;
  const std::string* path;
  int depth;
  std::exception_ptr failure;
};

void ForeignListing::run() {
  const ObjectId root(H5Oopen(file_, "/", H5P_DEFAULT));
  if (!root) {
    report_.issue("", IssueCode::object_damaged, 0, last_failure());
    return;
  }
  object(root.get(), "", 0);
}

herr_t ForeignListing::visit_link(hid_t group, const char* name, const H5L_info_t* info, void* data) {
  auto& here = *static_cast<Here*>(data);
  try {
    here.listing->link(group, name, *info, *here.path, here.depth);
    return here.listing->is_full_ ? 1 : 0;
  } catch (...) {
    here.failure = std::current_exception();
    return 1;
  }
}

void ForeignListing::link(hid_t group, const char* name, const H5L_info_t& info, const std::string& parent, int depth) {
  if (++objects_ > most_objects) {
    report_.issue("", IssueCode::too_many_objects, most_objects);
    is_full_ = true;
    return;
  }
  if (parent.size() + std::strlen(name) + 1 > most_path_bytes) {
    report_.issue(parent, IssueCode::name_length, std::strlen(name));
    return;
  }
  const std::string path = under(parent, name);
  if (info.type != H5L_TYPE_HARD) {
    unfollowed(group, name, info, path);
    return;
  }
  const ObjectId target(H5Oopen(group, name, H5P_DEFAULT));
  if (!target) {
    report_.issue(path, IssueCode::object_damaged, 0, last_failure());
    return;
  }
  object(target.get(), path, depth);
}

void ForeignListing::unfollowed(hid_t group, const char* name, const H5L_info_t& info, const std::string& path) {
  std::vector<char> value;
  if (info.type != H5L_TYPE_HARD && info.u.val_size != 0 && info.u.val_size <= longest_target) {
    value.resize(info.u.val_size + 1);
    if (H5Lget_val(group, name, value.data(), info.u.val_size, H5P_DEFAULT) < 0) value.clear();
  }
  if (info.type == H5L_TYPE_SOFT) {
    report_.issue(path, IssueCode::soft_link, 0, value.empty() ? "" : value.data());
    return;
  }
  if (info.type != H5L_TYPE_EXTERNAL) {
    report_.issue(path, IssueCode::user_link, static_cast<std::uint64_t>(info.type));
    return;
  }
  std::string words;
  unsigned flags = 0;
  const char* file = nullptr;
  const char* object = nullptr;
  if (!value.empty() && H5Lunpack_elink_val(value.data(), info.u.val_size, &flags, &file, &object) >= 0)
    words = std::string(file) + " : " + object;
  report_.issue(path, IssueCode::external_link, 0, words);
}

void ForeignListing::object(hid_t id, const std::string& path, int depth) {
  H5O_info_t info{};
  if (H5Oget_info2(id, &info, H5O_INFO_BASIC | H5O_INFO_NUM_ATTRS) < 0) {
    report_.issue(path, IssueCode::object_damaged, 0, last_failure());
    return;
  }
  const auto [known, is_new] = seen_.emplace(info.addr, path);
  if (!is_new) {
    report_.issue(path, IssueCode::second_name, info.type == H5O_TYPE_GROUP ? 1 : 0, known->second);
    return;
  }
  ObjectToRead more{.address = info.addr, .path = path, .has_attributes = info.num_attrs != 0};
  if (info.type == H5O_TYPE_GROUP) {
    if (depth >= most_depth) {
      report_.issue(path, IssueCode::too_deep, most_depth);
      return;
    }
    group(id, path, depth);
  } else if (info.type == H5O_TYPE_DATASET) {
    dataset(id, path, more);
  } else if (info.type == H5O_TYPE_NAMED_DATATYPE) {
    report_.issue(path, IssueCode::named_type);
  } else {
    report_.issue(path, IssueCode::object_kind, static_cast<std::uint64_t>(info.type));
  }
  if (!more.has_attributes && !more.is_text && !more.is_compact) return;
  // Tensors cannot do without their elements; of the rest so many will do.
  if (more.is_compact || to_read_.size() < most_to_read)
    to_read_.push_back(std::move(more));
  else if (to_read_.size() == most_to_read)
    report_.issue("", IssueCode::text_count, most_to_read);
}

void ForeignListing::group(hid_t id, const std::string& path, int depth) {
  Here here{this, &path, depth + 1, nullptr};
  hsize_t at = 0;
  const herr_t result = H5Literate(id, H5_INDEX_NAME, H5_ITER_NATIVE, &at, &visit_link, &here);
  if (here.failure) std::rethrow_exception(here.failure);
  if (result < 0) report_.issue(path, IssueCode::group_damaged, 0, last_failure());
}

void ForeignListing::dataset(hid_t id, const std::string& path, ObjectToRead& more) {
  const auto damaged = [&] { report_.issue(path, IssueCode::dataset_damaged, 0, last_failure()); };
  const PropertiesId properties(H5Dget_create_plist(id));
  if (!properties) return damaged();
  const H5D_layout_t layout = H5Pget_layout(properties.get());
  if (layout == H5D_VIRTUAL) return report_.issue(path, IssueCode::virtual_dataset);
  if (layout != H5D_COMPACT && layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED)
    return report_.issue(path, IssueCode::layout, static_cast<std::uint64_t>(layout));
  const int external = H5Pget_external_count(properties.get());
  if (external < 0) return damaged();
  if (external != 0) return report_.issue(path, IssueCode::external_storage, static_cast<std::uint64_t>(external));

  const TypeId type(H5Dget_type(id));
  if (!type) return damaged();
  const ElementType element = element_type(type.get());
  if (element.is_text) {
    more.is_text = true;
    return;
  }
  if (!element.dtype) return report_.issue(path, IssueCode::element_type, 0, element.refusal);

  const SpaceId space(H5Dget_space(id));
  if (!space) return damaged();
  const H5S_class_t kind = H5Sget_simple_extent_type(space.get());
  if (kind == H5S_NULL) return report_.issue(path, IssueCode::dataspace, 0, "it has no shape and no elements");
  const int rank = H5Sget_simple_extent_ndims(space.get());
  if (kind == H5S_NO_CLASS || rank < 0 || rank > most_rank) return damaged();
  std::vector<hsize_t> extents(static_cast<std::size_t>(rank));
  if (rank != 0 && H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr) < 0) return damaged();
  std::optional<std::uint64_t> bytes = element.bytes;
  // An extent of 0 makes the others harmless only after they were looked at: shapes are multiplied elsewhere too.
  bool is_empty = false;
  for (const hsize_t extent : extents) {
    is_empty = is_empty || extent == 0;
    bytes = bytes ? product(*bytes, extent == 0 ? 1 : extent) : std::nullopt;
  }
  if (!bytes) return report_.issue(path, IssueCode::dataspace, 0, "it claims more elements than a file can have");
  if (is_empty) bytes = 0;

  RecordBytes record(ForeignRecord::tensor);
  record.text(path).number(static_cast<std::uint64_t>(*element.dtype)).number(element.is_big_endian ? 1 : 0);
  record.number(extents.size());
  for (const hsize_t extent : extents) record.number(extent);

  std::array<char, most_fill_bytes> fill{};
  H5D_fill_value_t defined = H5D_FILL_VALUE_UNDEFINED;
  std::size_t fill_bytes = 0;
  if (H5Pfill_value_defined(properties.get(), &defined) >= 0 && defined == H5D_FILL_VALUE_USER_DEFINED &&
      element.bytes <= fill.size()) {
    // In the dataset's own type: nothing to convert.
    if (H5Pget_fill_value(properties.get(), type.get(), fill.data()) < 0) return damaged();
    fill_bytes = element.bytes;
  }
  record.text({fill.data(), fill_bytes});

  if (layout == H5D_CONTIGUOUS) {
    const haddr_t offset = H5Dget_offset(id);
    const hsize_t stored = H5Dget_storage_size(id);
    H5Eclear2(H5E_DEFAULT);
    // What was never written has no storage; its offset is not always told as undefined, a user block may be added to
    // it.
    const bool is_written = stored != 0 && *bytes != 0;
    if (is_written && (stored != *bytes || offset == HADDR_UNDEF))
      return report_.issue(path, IssueCode::dataset_damaged, stored, "its storage is not as large as its shape");
    record.number(static_cast<std::uint64_t>(StorageLayout::contiguous));
    record.number(is_written ? offset : 0).number(is_written ? *bytes : 0);
  } else if (layout == H5D_COMPACT) {
    const hsize_t stored = H5Dget_storage_size(id);
    if (stored != *bytes)
      return report_.issue(path, IssueCode::dataset_damaged, stored, "its storage is not as large as its shape");
    record.number(static_cast<std::uint64_t>(StorageLayout::compact));
    more.is_compact = *bytes != 0;
    more.bytes = *bytes;
  } else {
    record.number(static_cast<std::uint64_t>(StorageLayout::chunked));
    if (!chunked(id, properties.get(), path, extents, element.bytes, record)) return;
  }
  report_.record(record);
  more.item_bytes = element.bytes;
  more.tensor = tensors_++;
}

bool ForeignListing::chunked(hid_t id, hid_t properties, const std::string& path, const std::vector<hsize_t>& extents,
                             std::uint64_t item_bytes, RecordBytes& record) {
  std::array<hsize_t, most_rank> chunk{};
  const int rank = H5Pget_chunk(properties, most_rank, chunk.data());
  if (rank <= 0 || static_cast<std::size_t>(rank) != extents.size()) {
    report_.issue(path, IssueCode::dataset_damaged, 0, "its chunks have other dimensions than itself");
    return false;
  }
  const std::vector<hsize_t> sizes(chunk.begin(), chunk.begin() + rank);
  std::optional<std::uint64_t> bytes = item_bytes;
  for (const hsize_t size : sizes) {
    record.number(size);
    bytes = bytes && size != 0 ? product(*bytes, size) : std::nullopt;
  }
  if (!bytes || *bytes > most_chunk_bytes) {
    report_.issue(path, IssueCode::chunk_bytes, bytes.value_or(std::numeric_limits<std::uint64_t>::max()));
    return false;
  }
  return filters(properties, path, record) && chunk_places(id, path, extents, sizes, record);
}

bool ForeignListing::filters(hid_t properties, const std::string& path, RecordBytes& record) {
  const int count = H5Pget_nfilters(properties);
  if (count < 0 || count > most_filters) {
    report_.issue(path, IssueCode::dataset_damaged, 0, "it has too many filters");
    return false;
  }
  record.number(static_cast<std::uint64_t>(count));
  for (int i = 0; i < count; ++i) {
    constexpr std::size_t most_parameters = 8;
    std::array<unsigned, most_parameters> parameters{};
    std::size_t parameter_count = parameters.size();
    std::array<char, 64> name{};
    unsigned flags = 0;
    unsigned configuration = 0;
    const H5Z_filter_t filter = H5Pget_filter2(properties, static_cast<unsigned>(i), &flags, &parameter_count,
                                               parameters.data(), name.size() - 1, name.data(), &configuration);
    if (filter < 0) {
      report_.issue(path, IssueCode::dataset_damaged, 0, last_failure());
      return false;
    }
    const auto number = static_cast<std::uint64_t>(filter);
    if (number != filter_deflate && number != filter_shuffle && number != filter_fletcher32 && number != filter_zstd) {
      report_.issue(path, IssueCode::filter, number, name.data());
      return false;
    }
    record.number(number).number(parameter_count == 0 ? 0 : parameters[0]);
  }
  return true;
}

bool ForeignListing::chunk_places(hid_t id, const std::string& path, const std::vector<hsize_t>& extents,
                                  const std::vector<hsize_t>& chunk, RecordBytes& record) {
  std::uint64_t flags = 0;
  const PropertiesId properties(H5Dget_create_plist(id));
  unsigned options = 0;
  if (properties && H5Pget_chunk_opts(properties.get(), &options) >= 0 &&
      (options & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS) != 0)
    flags |= chunk_partial_unfiltered;
  std::uint64_t places = 1;
  for (std::size_t i = 0; i < chunk.size(); ++i) {
    const std::uint64_t here = extents[i] / chunk[i] + (extents[i] % chunk[i] != 0 ? 1 : 0);
    if (__builtin_mul_overflow(places, here, &places)) places = std::numeric_limits<std::uint64_t>::max();
  }
  // Before anything is counted: some indices have a place for every chunk, written or not.
  if (places > most_chunks - chunks_) {
    report_.issue(path, IssueCode::chunk_count, places);
    return false;
  }
  chunks_ += places;
  hsize_t stored = 0;
  const SpaceId space(H5Dget_space(id));
  if (!space || H5Dget_num_chunks(id, space.get(), &stored) < 0) {
    report_.issue(path, IssueCode::dataset_damaged, 0, last_failure());
    return false;
  }
  RecordBytes list;
  std::uint64_t found = 0;
  if (stored != 0) {
    RawProbe probe;
    std::vector<hsize_t> at(chunk.size(), 0);
    std::uint64_t last_index = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t last_end = 0;
    for (std::uint64_t index = 0; index < places; ++index) {
      std::uint32_t mask = 0;
      // The driver only notes the place: not a byte is put there.
      char nowhere = 0;
      const herr_t result = H5Dread_chunk(id, H5P_DEFAULT, at.data(), &mask, &nowhere);
      if (const std::optional<RawPlace> place = probe.take(); result >= 0 && place) {
        list.number(index - last_index).signed_number(static_cast<std::int64_t>(place->offset - last_end));
        list.number(place->bytes).number(mask);
        last_index = index;
        last_end = place->offset + place->bytes;
        if (++found == stored) break;
      }
      for (std::size_t i = at.size(); i-- > 0;) {
        at[i] += chunk[i];
        if (at[i] < extents[i]) break;
        at[i] = 0;
      }
    }
    H5Eclear2(H5E_DEFAULT);
  }
  if (found != stored) {
    report_.issue(path, IssueCode::dataset_damaged, 0,
                  "its index counts " + std::to_string(stored) + " chunks and has " + std::to_string(found));
    return false;
  }
  record.number(flags).number(found).append(list);
  return true;
}

}  // namespace muster::hdf5
