// A client that writes anything into its arena, at any moment between two steps of the executor;
// and a client that reads whatever stands in its completion ring. Nobody aborts or goes on for
// ever.
//
// An input is five indices and then words that fill the rings; what is left over is written over
// the indices again while the executor works.
#include <algorithm>
#include <cstring>

#include "larder/check.h"
#include "protocol/arena.h"
#include "protocol/text.h"
#include "tests/fuzz/fuzz.h"
#include "tests/protocol/arena_memory.h"

namespace larder::fuzz {
namespace {

using namespace protocol;

constexpr size_t kNumIndices = 5;

class Source {
 public:
  Source(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool is_empty() const { return size_ == 0; }
  template <typename T>
  T next() {
    T value{};
    const size_t taken = std::min(sizeof value, size_);
    if (taken > 0) std::memcpy(&value, data_, taken);
    data_ += taken;
    size_ -= taken;
    return value;
  }
  void fill(std::byte* to, size_t size) {
    const size_t taken = std::min(size, size_);
    if (taken > 0) std::memcpy(to, data_, taken);
    data_ += taken;
    size_ -= taken;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

void write_index(ArenaHeader& header, uint32_t which, uint32_t value) {
  std::atomic<uint32_t>* indices[kNumIndices] = {&header.submit_tail, &header.submit_head,
                                                 &header.sleeping, &header.complete_tail,
                                                 &header.complete_head};
  indices[which % kNumIndices]->store(value);
}

void check_holds(const Arena& arena, uint64_t offset, uint64_t bytes) {
  __extension__ using Wide = unsigned __int128;
  const bool expected =
      offset >= kArenaDataOffset && Wide{offset} + Wide{bytes} <= Wide{arena.memory().size()};
  LARDER_CHECK(arena.holds(offset, bytes) == expected, offset, bytes);
}

void serve(Arena arena, Source& source) {
  ArenaServer server(arena);
  uint32_t num_since_write = 0;
  while (true) {
    LARDER_CHECK(server.num_pending() <= kSubmissionSlots);
    const auto head = server.peek();
    const bool runs = head.ok() && head->has_value() && server.can_complete();
    if (runs) {
      const Submission& record = **head;
      (void)server.wait_reached(record);
      check_holds(arena, record.slots.offset_bytes, record.slots.count);
      check_holds(arena, record.first.offset_bytes, record.second.offset_bytes);
      server.complete(record, Status(ErrorCode::kInvalidArgument, "refused"));
      // A client that stands still gets at most one ring served.
      LARDER_CHECK(++num_since_write <= kSubmissionSlots, num_since_write);
    }
    if (source.is_empty()) {
      if (!runs) return;
      continue;
    }
    if (runs && source.next<uint8_t>() % 4 != 0) continue;
    const auto which = source.next<uint8_t>();
    write_index(arena.header(), which, source.next<uint32_t>());
    num_since_write = 0;
    if (which >= 128) server = ArenaServer(arena);
  }
}

void read(Arena arena) {
  CompletionReader reader(arena);
  uint32_t num_read = 0;
  while (const auto completion = reader.pop()) {
    const Status status = completion_status(*completion);
    LARDER_CHECK(is_printable(status.message()));
    LARDER_CHECK(++num_read <= kCompletionSlots, num_read);
  }
  SubmissionWriter writer(arena);
  uint32_t num_written = 0;
  while (writer.push({})) LARDER_CHECK(++num_written <= kSubmissionSlots, num_written);
}

}  // namespace

const size_t kMaxInputBytes = 96 * 1024;

std::vector<Input> corpus(std::mt19937_64& engine) {
  std::vector<Input> inputs;
  for (int i = 0; i < 32; ++i) {
    // A ring with some submissions, some completions unread, then a few later writes.
    const auto start = static_cast<uint32_t>(i % 2 == 0 ? engine() : 0u - engine() % 100);
    const uint32_t indices[kNumIndices] = {start + static_cast<uint32_t>(engine() % 65), start, 0,
                                           start + static_cast<uint32_t>(engine() % 129), start};
    Input input(sizeof indices + kArenaDataOffset - kArenaWordsOffset + engine() % 200);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(engine() % 4 == 0 ? engine() : 0);
    std::memcpy(input.data(), indices, sizeof indices);
    if (i % 4 == 0) input.resize(sizeof indices + engine() % 100);
    inputs.push_back(std::move(input));
  }
  return inputs;
}

}  // namespace larder::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace larder;
  static const test::ArenaMemory kMemory;
  std::memset(kMemory.bytes().data(), 0, protocol::kArenaDataOffset);
  const protocol::Arena arena = kMemory.arena();
  fuzz::Source source(data, size);
  for (uint32_t i = 0; i < fuzz::kNumIndices; ++i)
    fuzz::write_index(arena.header(), i, source.next<uint32_t>());
  source.fill(kMemory.bytes().data() + protocol::kArenaWordsOffset,
              protocol::kArenaDataOffset - protocol::kArenaWordsOffset);
  fuzz::serve(arena, source);
  fuzz::read(arena);
  return 0;
}
