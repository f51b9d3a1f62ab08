// LocalSession: a session of the daemon in this process.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/ctl/replay/operations.h"

namespace larder::replay {

class LocalSession final : public Session {
 public:
  // Connects. Refused as Client::connect is.
  static Result<std::unique_ptr<LocalSession>> open(const SessionSettings& settings);
  Outcome run(const Step& step, const Context& context) override;

 private:
  struct Entry {
    OpenedGroups groups;
    std::vector<Pool> opened_again;  // closing any of them would close the pool for the session
    Sequences sequences;             // gone before the pool is
  };

  LocalSession(SessionSettings settings, Client client)
      : settings_(std::move(settings)), client_(std::move(client)), pages_(settings_) {}
  Outcome open_pool(const Step& step, const OpenPool& open);
  Outcome run_on_pool(const Step& step, Entry& pool, const Context& context);
  Outcome access_bytes(const RawBytes& step, OpenedPool& pool, const Context& context);

  const SessionSettings settings_;
  Client client_;
  PageAccess pages_;
  std::map<std::string, std::unique_ptr<Entry>> pools_;
};

}  // namespace larder::replay
