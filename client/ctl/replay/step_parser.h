// Private to the parser: one step's fields, and what all operations share.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "client/ctl/replay/parse.h"

namespace larder::replay {

struct StepParser {
  Fields& fields;
  Step& step;
  const std::filesystem::path& folder;
  Scope* scope;  // nullptr: names are not looked at

  // A name of an earlier result that is of the right kind.
  std::string result_name(const Cursor& cursor, const std::set<std::string> Scope::*kind,
                          const std::string& what);
  BlockItem block_of_result(const Cursor& cursor);  // ["b", i]
  BlockList blocks(const Cursor& cursor);
  SlotList slots(const Cursor& cursor);
  SequenceTable table();
  HexSource hex(const Cursor& cursor);
  std::vector<int32_t> tokens(const Cursor& cursor);
  std::vector<std::string> extra();
  // That the step's pool has a group of this name.
  void check_group(const Cursor& at, const std::string& name) const;
  void attend_fields(AttendFields& to);
  std::vector<float> floats(const std::string& key);
};

OpenPool parse_open_pool(StepParser& parser);
Attend parse_attend(StepParser& parser);
SparseMla parse_sparse_mla(StepParser& parser);
Merge parse_merge(StepParser& parser);
Gather parse_gather(StepParser& parser);
Append parse_append(StepParser& parser);
Read parse_read(StepParser& parser);
SequenceStep parse_sequence(StepParser& parser);

}  // namespace larder::replay
