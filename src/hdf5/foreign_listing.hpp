// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lists a file by rules that keep libhdf5 away from what it does badly. Runs inside the fence.
//
// 1. Hard links alone are followed, each object once (by its address), 32 groups deep.
// 2. A dataset's layout is asked for before its extents: asking a virtual one for its extents opens its sources.
// 3. Types, extents, filters, chunks: what is not known here, or larger than a limit, is an issue and goes no further.
// 4. No element goes through libhdf5, but those of compact datasets, which stand in the header that it has read.
// 5. Text comes last: reading it is the most that libhdf5 is made to do, and all tensors are told by then.

#include <hdf5.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "src/hdf5/foreign_report_writer.hpp"

namespace muster::hdf5 {

/// An object that has more to say in the second pass.
struct ObjectToRead {
  haddr_t address = HADDR_UNDEF;
  std::string path;
  std::int64_t tensor = -1;      ///< its number in the report
  std::uint64_t item_bytes = 0;  ///< of its elements
  std::uint64_t bytes = 0;       ///< of all of them, where is_compact
  bool is_compact = false;
  bool is_text = false;
  bool has_attributes = false;
};

class ForeignListing {
 public:
  ForeignListing(hid_t file, ReportWriter& report) : file_(file), report_(report) {}
  /// Throws ReportFull, std::bad_alloc.
  void run();
  [[nodiscard]] const std::vector<ObjectToRead>& to_read() const noexcept { return to_read_; }

 private:
  struct Here;
  static herr_t visit_link(hid_t group, const char* name, const H5L_info_t* info, void* here);
  void link(hid_t group, const char* name, const H5L_info_t& info, const std::string& parent, int depth);
  void unfollowed(hid_t group, const char* name, const H5L_info_t& info, const std::string& path);
  void object(hid_t object, const std::string& path, int depth);
  void group(hid_t group, const std::string& path, int depth);
  void dataset(hid_t dataset, const std::string& path, ObjectToRead& more);
  bool chunked(hid_t dataset, hid_t properties, const std::string& path, const std::vector<hsize_t>& extents,
               std::uint64_t item_bytes, RecordBytes& record);
  bool filters(hid_t properties, const std::string& path, RecordBytes& record);
  bool chunk_places(hid_t dataset, const std::string& path, const std::vector<hsize_t>& extents,
                    const std::vector<hsize_t>& chunk, RecordBytes& record);

  hid_t file_;
  ReportWriter& report_;
  std::uint64_t objects_ = 0;
  std::uint64_t chunks_ = 0;
  std::int64_t tensors_ = 0;
  bool is_full_ = false;
  std::unordered_map<haddr_t, std::string> seen_;
  std::vector<ObjectToRead> to_read_;
};

/// libhdf5's own words for its last failure: the innermost ones. Clears them.
std::string last_failure();

}  // namespace muster::hdf5
