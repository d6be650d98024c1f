// SPDX-License-Identifier: Apache-2.0
#include "src/merge/boxes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "muster/error.hpp"

namespace muster::merge {
namespace {

using Numbers = std::span<const std::int64_t>;

constexpr std::uint64_t most_compared = 200'000'000;

bool meet(const BoxView& a, const BoxView& b) noexcept {
  for (std::size_t dim = 0; dim < a.begin.size(); ++dim)
    if (a.begin[dim] >= b.begin[dim] + b.extents[dim] || b.begin[dim] >= a.begin[dim] + a.extents[dim]) return false;
  return true;
}

/// Returns the elements of `box` outside `hole`, as boxes that do not overlap.
std::vector<OwnedBox> without(OwnedBox box, const OwnedBox& hole) {
  std::vector<OwnedBox> rest;
  if (!meet(box.view(), hole.view())) return {std::move(box)};
  for (std::size_t dim = 0; dim < box.begin.size(); ++dim) {
    const std::int64_t begin = box.begin[dim];
    const std::int64_t end = begin + box.extents[dim];
    const std::int64_t from = std::max(begin, hole.begin[dim]);
    const std::int64_t to = std::min(end, hole.begin[dim] + hole.extents[dim]);
    const auto add = [&](std::int64_t first, std::int64_t last) {
      if (first == last) return;
      OwnedBox& part = rest.emplace_back(box);
      part.begin[dim] = first;
      part.extents[dim] = last - first;
    };
    add(begin, from);
    add(to, end);
    box.begin[dim] = from;
    box.extents[dim] = to - from;
  }
  return rest;
}

/// Boxes in bytes. Dimensions that all boxes have completely are part of the unit.
struct BytePlan {
  struct PlacedBox {
    int source = 0;
    Shape begin;
    Shape end;
    std::vector<std::uint64_t> steps;  // bytes from element to element of the source
    std::uint64_t from = 0;            // bytes of the source before the box
  };
  Shape whole;
  std::uint64_t unit = 1;  // bytes
  std::vector<PlacedBox> boxes;
};

[[noreturn]] void refuse_shared_byte() {
  throw Error(ErrorKind::unsupported,
              "packed elements of different parts would share a byte. Pass parts that end between bytes");
}

bool is_full(const OwnedBox& box, std::size_t dim, std::int64_t extent) {
  return box.begin[dim] == 0 && box.extents[dim] == extent;
}

BytePlan byte_plan(const TensorSpec& target, std::span<const SourceBox> boxes) {
  BytePlan plan{target.shape, 0, {}};
  auto unit_bits = static_cast<std::uint64_t>(bits(target.dtype));
  const auto all_have = [&](std::size_t dim) {
    return std::ranges::all_of(boxes, [&](const SourceBox& each) {
      return is_full(each.box, dim, plan.whole[dim]) && is_full(each.all, dim, plan.whole[dim]);
    });
  };
  while (!plan.whole.empty() && all_have(plan.whole.size() - 1)) {
    unit_bits *= static_cast<std::uint64_t>(plan.whole.back());
    plan.whole.pop_back();
  }
  const std::size_t dims = plan.whole.size();
  // Units of packed elements that end inside a byte: the innermost dimension is counted in bytes, if that is possible.
  const bool is_packed = unit_bits % 8 != 0 && dims != 0;
  const auto scaled = [&](std::int64_t number, std::size_t dim) {
    if (!is_packed || dim + 1 != dims) return number;
    const std::int64_t in_bits = number * static_cast<std::int64_t>(unit_bits);
    if (in_bits % 8 != 0) refuse_shared_byte();
    return in_bits / 8;
  };
  for (std::size_t dim = 0; dim < dims; ++dim) plan.whole[dim] = scaled(plan.whole[dim], dim);
  plan.unit = is_packed ? 1 : (unit_bits + 7) / 8;
  for (const SourceBox& each : boxes) {
    if (volume(each.box.extents) == 0) continue;
    BytePlan::PlacedBox& box =
        plan.boxes.emplace_back(BytePlan::PlacedBox{each.source, {}, {}, std::vector<std::uint64_t>(dims)});
    std::uint64_t step = plan.unit;
    for (std::size_t dim = dims; dim-- > 0;) {
      box.steps[dim] = step;
      box.from += static_cast<std::uint64_t>(scaled(each.box.begin[dim] - each.all.begin[dim], dim)) * step;
      step *= static_cast<std::uint64_t>(scaled(each.all.extents[dim], dim));
    }
    for (std::size_t dim = 0; dim < dims; ++dim) {
      box.begin.push_back(scaled(each.box.begin[dim], dim));
      box.end.push_back(box.begin.back() + scaled(each.box.extents[dim], dim));
    }
  }
  return plan;
}

bool is_next(const Run& a, const Run& b) {
  return a.source == b.source && a.begin + a.bytes == b.begin && a.at + a.bytes == b.at;
}

/// Appends a run of a row, to the last run if both are contiguous.
void add_run(std::vector<Run>& runs, const Run& run) {
  if (!runs.empty() && is_next(runs.back(), run))
    runs.back().bytes += run.bytes;
  else
    runs.push_back(run);
}

/// Cuts a tensor into bands, dimension by dimension.
class Banding {
 public:
  explicit Banding(const BytePlan& plan) : plan_(plan) {
    below_.assign(plan.whole.size() + 1, plan.unit);
    for (std::size_t dim = plan.whole.size(); dim-- > 0;)
      below_[dim] = below_[dim + 1] * static_cast<std::uint64_t>(plan.whole[dim]);
  }

  std::vector<Band> operator()() const {
    std::vector<BandEntry> all;
    for (const BytePlan::PlacedBox& box : plan_.boxes) all.push_back({&box, box.from});
    if (all.empty()) return {};
    std::vector<Band> bands = cut(0, std::move(all));
    for (Band& band : bands)
      if (band.rows.count == 1)
        for (Run& run : band.rows.runs) run.stride = run.bytes;
    return bands;
  }

 private:
  /// A box that contains the current indices of all outer dimensions.
  struct BandEntry {
    const BytePlan::PlacedBox* box = nullptr;
    std::uint64_t from = 0;  // bytes of the source before these indices
  };

  // Returns the bands of one index of the outer dimensions.
  [[nodiscard]] std::vector<Band> cut(std::size_t dim, std::vector<BandEntry> entries) const {
    if (dim == plan_.whole.size())
      return {{0, {1, plan_.unit, {{entries.front().box->source, entries.front().from, 0, plan_.unit, 0}}}}};
    std::vector<std::int64_t> cuts;
    for (const BandEntry& entry : entries) {
      cuts.push_back(entry.box->begin[dim]);
      cuts.push_back(entry.box->end[dim]);
    }
    std::ranges::sort(cuts);
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::ranges::stable_sort(entries, {}, [&](const BandEntry& entry) { return entry.box->begin[dim]; });
    std::vector<Band> bands;
    std::vector<BandEntry> active;
    auto next = entries.begin();
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      std::erase_if(active, [&](const BandEntry& entry) { return entry.box->end[dim] <= cuts[i]; });
      for (; next != entries.end() && next->box->begin[dim] <= cuts[i]; ++next) active.push_back(*next);
      std::vector<BandEntry> inner = active;
      for (BandEntry& entry : inner)
        entry.from += static_cast<std::uint64_t>(cuts[i] - entry.box->begin[dim]) * entry.box->steps[dim];
      std::map<int, std::uint64_t> steps;
      for (const BandEntry& entry : inner) steps[entry.box->source] = entry.box->steps[dim];
      append(bands, cut(dim + 1, std::move(inner)), static_cast<std::uint64_t>(cuts[i]) * below_[dim + 1],
             static_cast<std::uint64_t>(cuts[i + 1] - cuts[i]), below_[dim + 1], steps);
    }
    return bands;
  }

  // Appends `count` times the bands of one index, whose bytes are `step` bytes of the target.
  static void append(std::vector<Band>& bands, std::vector<Band> once, std::uint64_t at, std::uint64_t count,
                     std::uint64_t step, const std::map<int, std::uint64_t>& steps) {
    if (count > 1) {
      if (const std::uint64_t runs = runs_of(once); once.size() > 1 && runs <= count * once.size())
        once = {as_one_row(once, step)};
      if (once.size() == 1 && once.front().rows.count == 1) {
        add_rows(bands, at, std::move(once.front().rows), count, steps);
        return;
      }
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      for (Band band : once) {
        band.at += at + i * step;
        for (Run& run : band.rows.runs) run.begin += i * steps.at(run.source);
        add(bands, std::move(band));
      }
    }
  }

  static std::uint64_t runs_of(std::span<const Band> bands) {
    return std::accumulate(bands.begin(), bands.end(), std::uint64_t{0}, [](std::uint64_t sum, const Band& band) {
      return sum + band.rows.count * band.rows.runs.size();
    });
  }

  static Band as_one_row(std::span<const Band> bands, std::uint64_t bytes) {
    Band one{0, {1, bytes, {}}};
    for (const Band& band : bands)
      for (std::uint64_t row = 0; row < band.rows.count; ++row)
        for (const Run& run : band.rows.runs)
          add_run(one.rows.runs, {run.source, run.begin + row * run.stride, 0, run.bytes,
                                  band.at + row * band.rows.row_bytes + run.at});
    return one;
  }

  static void add_rows(std::vector<Band>& bands, std::uint64_t at, Rows rows, std::uint64_t count,
                       const std::map<int, std::uint64_t>& steps) {
    for (Run& run : rows.runs) run.stride = steps.at(run.source);
    rows.count = count;
    // Rows of one run that follow each other in the source as well are a single row.
    if (Run& first = rows.runs.front(); rows.runs.size() == 1 && first.stride == rows.row_bytes) {
      rows.row_bytes *= count;
      first.bytes = rows.row_bytes;
      rows.count = 1;
    }
    add(bands, {at, std::move(rows)});
  }

  // Joins bands of one row that follow each other.
  static void add(std::vector<Band>& bands, Band band) {
    if (bands.empty() || bands.back().rows.count != 1 || band.rows.count != 1) {
      bands.push_back(std::move(band));
      return;
    }
    Band& last = bands.back();
    for (Run run : band.rows.runs) {
      run.at += band.at - last.at;
      add_run(last.rows.runs, run);
    }
    last.rows.row_bytes += band.rows.row_bytes;
  }

  const BytePlan& plan_;
  std::vector<std::uint64_t> below_;  // bytes of one index of all dimensions before this one
};

}  // namespace

std::string box_text(const BoxView& box) {
  std::string text = "[";
  for (std::size_t i = 0; i < box.begin.size(); ++i)
    text += fmt::format("{}{}:{}", i == 0 ? "" : ", ", box.begin[i], box.begin[i] + box.extents[i]);
  return text + "]";
}

std::uint64_t volume(Numbers extents) noexcept {
  return std::accumulate(extents.begin(), extents.end(), std::uint64_t{1},
                         [](std::uint64_t a, std::int64_t b) { return a * static_cast<std::uint64_t>(b); });
}

Strides row_major_strides(Numbers extents) {
  Strides strides(extents.size(), 1);
  for (std::size_t i = extents.size(); i-- > 1;) strides[i - 1] = strides[i] * extents[i];
  return strides;
}

bool is_inside(const BoxView& box, Numbers whole) noexcept {
  if (box.begin.size() != whole.size() || box.extents.size() != whole.size()) return false;
  for (std::size_t i = 0; i < whole.size(); ++i)
    if (box.begin[i] < 0 || box.extents[i] < 0 || box.begin[i] > whole[i] || box.extents[i] > whole[i] - box.begin[i])
      return false;
  return true;
}

OwnedBox common_of(const BoxView& a, const BoxView& b) {
  OwnedBox common;
  for (std::size_t dim = 0; dim < a.begin.size(); ++dim) {
    common.begin.push_back(std::max(a.begin[dim], b.begin[dim]));
    const std::int64_t end = std::min(a.begin[dim] + a.extents[dim], b.begin[dim] + b.extents[dim]);
    common.extents.push_back(std::max<std::int64_t>(end - common.begin.back(), 0));
  }
  return common;
}

void for_boxes(Numbers extents, std::int64_t first, std::int64_t count,
               const std::function<void(const Shape&, const Shape&)>& work) {
  const Strides strides = row_major_strides(extents);
  Shape begin(extents.size(), 0);
  Shape size(extents.begin(), extents.end());
  while (count > 0) {
    // The outermost dimension of which whole steps begin here and are in the range.
    std::size_t dim = 0;
    while (first % strides[dim] != 0 || count < strides[dim]) ++dim;
    std::int64_t rest = first;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      begin[i] = i <= dim ? rest / strides[i] : 0;
      size[i] = i < dim ? 1 : extents[i];
      rest %= strides[i];
    }
    size[dim] = std::min(extents[dim] - begin[dim], count / strides[dim]);
    work(begin, size);
    first += size[dim] * strides[dim];
    count -= size[dim] * strides[dim];
  }
}

Cover cover_of(std::span<const BoxView> boxes, std::size_t most) {
  Cover cover;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const std::uint64_t count = volume(boxes[i].extents);
    cover.elements += count;
    if (count != 0) order.push_back(i);
  }
  // Sorted by their start in some dimension, boxes need comparing only if they overlap in it.
  std::size_t sweep = 0;
  std::size_t most_distinct = 0;
  const std::size_t dims = order.empty() ? 0 : boxes[order.front()].begin.size();
  for (std::size_t dim = 0; order.size() > 1 && dim < dims; ++dim) {
    std::vector<std::int64_t> begins;
    begins.reserve(order.size());
    for (const std::size_t i : order) begins.push_back(boxes[i].begin[dim]);
    std::ranges::sort(begins);
    const auto distinct = static_cast<std::size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (distinct > most_distinct) sweep = dim, most_distinct = distinct;
  }
  const auto begin_of = [&](std::size_t i) { return dims == 0 ? 0 : boxes[i].begin[sweep]; };
  const auto end_of = [&](std::size_t i) { return dims == 0 ? 1 : boxes[i].begin[sweep] + boxes[i].extents[sweep]; };
  std::ranges::stable_sort(order, {}, begin_of);
  std::uint64_t compared = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (std::size_t j = i + 1; j < order.size() && begin_of(order[j]) < end_of(order[i]); ++j) {
      if (++compared == most_compared) {
        cover.is_known = false;
        return cover;
      }
      if (!meet(boxes[order[i]], boxes[order[j]])) continue;
      cover.overlaps.emplace_back(std::minmax(order[i], order[j]));
      if (cover.overlaps.size() == most) return cover;
    }
  }
  return cover;
}

std::vector<SourceBox> cut_overlaps(std::vector<SourceBox> boxes,
                                    std::span<const std::pair<std::size_t, std::size_t>> overlaps,
                                    std::vector<CommonBox>& common) {
  std::vector<std::vector<std::size_t>> earlier(boxes.size());
  for (const auto& [first, second] : overlaps) earlier[second].push_back(first);
  std::vector<SourceBox> result;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    std::vector<OwnedBox> rest{boxes[i].box};
    for (const std::size_t other : earlier[i]) {
      common.push_back({boxes[other].source, boxes[i].source, common_of(boxes[other].box.view(), boxes[i].box.view())});
      std::vector<OwnedBox> left;
      for (OwnedBox& part : rest)
        for (OwnedBox& piece : without(std::move(part), boxes[other].box)) left.push_back(std::move(piece));
      rest = std::move(left);
    }
    for (OwnedBox& part : rest) result.push_back({boxes[i].source, std::move(part), boxes[i].all});
  }
  return result;
}

std::vector<Band> bands_of(const TensorSpec& target, std::span<const SourceBox> boxes) {
  return Banding(byte_plan(target, boxes))();
}

std::vector<Rectangle> rows_in_source(const TensorSpec& target, const OwnedBox& box, const OwnedBox& all) {
  if (volume(box.extents) == 0) return {};
  auto unit_bits = static_cast<std::uint64_t>(bits(target.dtype));
  std::size_t dims = target.shape.size();
  // Dimensions that the box has completely are part of the unit; every source of the box has them, too.
  while (dims != 0 && is_full(box, dims - 1, target.shape[dims - 1]))
    unit_bits *= static_cast<std::uint64_t>(target.shape[--dims]);
  if (dims == 0) return {{.bytes = (unit_bits + 7) / 8, .rows = 1}};
  const auto bytes_of = [&](std::int64_t units) {
    const std::uint64_t in_bits = static_cast<std::uint64_t>(units) * unit_bits;
    if (in_bits % 8 != 0) refuse_shared_byte();
    return in_bits / 8;
  };
  const Strides strides = row_major_strides(std::span(all.extents).first(dims));
  Rectangle rows{.bytes = bytes_of(box.extents[dims - 1]), .rows = 1};
  if (dims > 1) {
    rows.rows = static_cast<std::uint64_t>(box.extents[dims - 2]);
    rows.from_stride = bytes_of(strides[dims - 2]);
  }
  std::vector<Rectangle> rectangles;
  Shape index(dims, 0);
  for (;;) {
    std::int64_t from = 0;
    for (std::size_t dim = 0; dim < dims; ++dim) from += (box.begin[dim] - all.begin[dim] + index[dim]) * strides[dim];
    rows.from = bytes_of(from);
    rectangles.push_back(rows);
    std::size_t dim = dims > 1 ? dims - 2 : 0;
    while (dim > 0 && ++index[dim - 1] == box.extents[dim - 1]) index[--dim] = 0;
    if (dim == 0) return rectangles;
  }
}

}  // namespace muster::merge
