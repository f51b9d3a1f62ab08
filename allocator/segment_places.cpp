#include "allocator/segment_places.h"

#include <iterator>
#include <limits>

#include "larder/check.h"

namespace larder {

SegmentPlaces::SegmentPlaces(int64_t max_bytes, int64_t granularity_bytes)
    : granularity_bytes_(granularity_bytes) {
  LARDER_CHECK(max_bytes > 0 && granularity_bytes > 0, max_bytes, granularity_bytes);
  LARDER_CHECK(max_bytes <= std::numeric_limits<int64_t>::max() - granularity_bytes, max_bytes);
  max_bytes_ = (max_bytes + granularity_bytes - 1) / granularity_bytes * granularity_bytes;
}

std::vector<SegmentPlaces::Place> SegmentPlaces::within(int64_t offset_bytes,
                                                        int64_t size_bytes) const {
  LARDER_CHECK(size_bytes > 0 && size_bytes % granularity_bytes_ == 0, size_bytes);
  LARDER_CHECK(offset_bytes >= 0 && offset_bytes % granularity_bytes_ == 0, offset_bytes);
  LARDER_CHECK(offset_bytes <= max_bytes_ && size_bytes <= max_bytes_ - offset_bytes, size_bytes,
               offset_bytes, max_bytes_);
  auto next = sizes_.lower_bound(offset_bytes);
  if (next != sizes_.begin()) {
    const auto& [offset, size] = *std::prev(next);
    LARDER_CHECK(offset + size <= offset_bytes, offset, size, offset_bytes);
  }
  std::vector<Place> found;
  for (; next != sizes_.end() && next->first < offset_bytes + size_bytes; ++next) {
    const auto& [offset, size] = *next;
    LARDER_CHECK(offset + size <= offset_bytes + size_bytes, offset, size, offset_bytes,
                 size_bytes);
    found.push_back({offset, size});
  }
  return found;
}

std::vector<SegmentPlaces::Place> SegmentPlaces::all() const { return within(0, max_bytes_); }

}  // namespace larder
