// Effects as text, with all that they say: for comparing two machines and for messages of tests.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "allocator/effects.h"

namespace larder::test {

struct EffectText {
  std::ostringstream out;

  void blocks(const std::vector<BlockRef>& refs) {
    for (const BlockRef& block : refs) out << ' ' << block.id << '/' << block.generation;
  }
  void ids(const std::vector<int32_t>& numbers) {
    for (int32_t number : numbers) out << ' ' << number;
  }

  void operator()(const Status& status) { out << status.to_string(); }
  void operator()(const Done&) { out << "done"; }
  void operator()(const PoolOpened& opened) {
    out << "pool " << value(opened.pool) << (opened.created ? " created" : " attached");
    for (const GroupLayout& group : opened.groups)
      out << ' ' << group.num_blocks << '*' << group.block_stride_bytes;
  }
  void operator()(const BlocksAllocated& allocated) {
    out << "allocated";
    blocks(allocated.blocks);
  }
  void operator()(const BlocksPublished& published) {
    out << "published";
    for (const BlockKey& key : published.keys)
      for (uint8_t byte : key) out << ' ' << int{byte};
    blocks(published.blocks);
  }
  void operator()(const PrefixFound& found) {
    out << "found " << found.hit_tokens << " tokens";
    blocks(found.blocks);
  }

  void operator()(const ExtentsMapped& mapped) {
    out << "mapped";
    for (const SegmentId segment : mapped.segments) out << ' ' << value(segment);
  }
  void operator()(const Resized& resized) {
    out << "blocks " << resized.blocks_before << " to " << resized.blocks_after << ", bytes "
        << resized.bytes_before << " to " << resized.bytes_after;
  }

  void operator()(const Reply& reply) {
    out << "reply to " << value(reply.session) << '.' << reply.request << ": ";
    std::visit(*this, reply.body);
  }
  void operator()(const CreateSegment& create) {
    out << "create segment " << value(create.segment) << " of pool " << value(create.pool) << '.'
        << create.group << '.' << create.index << ": " << create.size_bytes;
  }
  void operator()(const DropSegment& drop) { out << "drop segment " << value(drop.segment); }
  void operator()(const PoolCreated& created) { out << "pool created " << value(created.pool); }
  void operator()(const PoolDestroyed& gone) { out << "pool destroyed " << value(gone.pool); }
  void operator()(const SetOwnerWord& set) {
    out << "word of block " << value(set.pool) << '.' << set.group << '.' << set.block << " = "
        << set.word;
  }
  void operator()(const RunCopy& run) {
    out << "run copy " << run.copy << " in " << value(run.pool) << '.' << run.group << ':';
    ids(run.from);
    out << " to";
    ids(run.to);
  }
  void operator()(const FenceSession& fence) {
    out << "fence " << value(fence.session) << ' ' << fence_class_name(fence.fence);
  }
  void operator()(const ExtentAdded& added) {
    out << "extent added " << value(added.pool) << '.' << added.group << '.' << added.index
        << ": segment " << value(added.segment) << " of " << added.size_bytes;
  }
  void operator()(const ExtentRemoved& removed) {
    out << "extent removed " << value(removed.pool) << '.' << removed.group << '.' << removed.index
        << ": segment " << value(removed.segment);
  }
  void operator()(const UnmapSegment& unmap) {
    out << "unmap " << value(unmap.pool) << '.' << unmap.group << '.' << unmap.index << ": segment "
        << value(unmap.segment) << " by " << value(unmap.session);
  }
};

inline std::vector<std::string> effect_texts(const Effects& effects) {
  std::vector<std::string> texts;
  for (const Effect& effect : effects) {
    EffectText text;
    std::visit(text, effect);
    texts.push_back(text.out.str());
  }
  return texts;
}

}  // namespace larder::test
