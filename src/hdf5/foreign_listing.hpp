// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lists a file by rules that keep libhdf5 away from what it does badly. Runs inside the fence.
//
// 1. Hard links alone are followed, each object once (by its address), 32 groups deep.
// 2. A dataset's layout is asked for before its extents: asking a virtual one for its extents opens its sources.
// 3. Types, extents, filters, chunks: what is not known here, or larger than a limit, is an issue and goes no further.
// 4. No element is read here (foreign_elements.hpp does that when it is asked).
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
  std::int64_t tensor = -1;  ///< its number in the report
  bool is_text = false;
  bool has_attributes = false;
};

class ForeignListing {
 public:
  /// `file_bytes` is the file's length.
  ForeignListing(hid_t file, std::uint64_t file_bytes, ReportWriter& report)
      : file_(file), file_bytes_(file_bytes), report_(report) {}
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
  /// What is wrong with a dataset, in words; empty where it is a tensor or text.
  std::string dataset(hid_t dataset, ObjectToRead& more);
  std::string chunks(hid_t properties, const std::vector<hsize_t>& extents, std::uint64_t item_bytes);

  hid_t file_;
  std::uint64_t file_bytes_;
  ReportWriter& report_;
  std::uint64_t objects_ = 0;
  std::uint64_t chunks_ = 0;
  std::int64_t tensors_ = 0;
  bool is_full_ = false;
  bool has_too_many_texts_ = false;
  std::unordered_map<haddr_t, std::string> seen_;
  std::vector<ObjectToRead> to_read_;
};

/// The second pass (foreign_text.cpp): attributes and datasets of text. Throws ReportFull, std::bad_alloc.
void report_texts(hid_t file, const std::vector<ObjectToRead>& objects, ReportWriter& report);

}  // namespace muster::hdf5
