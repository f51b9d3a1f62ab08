#include "client/ctl/queries.h"

#include <iterator>

namespace larder::ctl {

Result<ControlConnection> connect(const Target& target) {
  protocol::Connect hello;
  hello.tenant = target.tenant;
  hello.token = target.token;
  hello.role = "admin";
  hello.client_name = "larderctl";
  auto connection = ControlConnection::connect(target.socket_path, hello, target.deadline);
  if (connection.ok() || connection.status().code() != ErrorCode::kPermissionDenied)
    return connection;
  hello.role = "read";
  return ControlConnection::connect(target.socket_path, hello, target.deadline);
}

Result<std::vector<protocol::PoolInfo>> list_pools(ControlConnection& connection) {
  std::vector<protocol::PoolInfo> all;
  bool more = true;
  while (more) {
    auto page = connection.call_for<protocol::Pools>(
        protocol::ListPools{all.empty() ? 0 : all.back().pool});
    if (!page) return page.status();
    more = page->more && !page->pools.empty();
    all.insert(all.end(), std::make_move_iterator(page->pools.begin()),
               std::make_move_iterator(page->pools.end()));
  }
  return all;
}

Result<std::vector<protocol::SessionInfo>> list_sessions(ControlConnection& connection) {
  std::vector<protocol::SessionInfo> all;
  bool more = true;
  while (more) {
    auto page = connection.call_for<protocol::Sessions>(
        protocol::ListSessions{all.empty() ? 0 : all.back().session});
    if (!page) return page.status();
    more = page->more && !page->sessions.empty();
    all.insert(all.end(), std::make_move_iterator(page->sessions.begin()),
               std::make_move_iterator(page->sessions.end()));
  }
  return all;
}

Status destroy_pool(ControlConnection& connection, const Target& target, const std::string& name) {
  auto pools = list_pools(connection);
  if (!pools) return pools.status();
  for (const protocol::PoolInfo& pool : *pools)
    if (pool.tenant == target.tenant && pool.name == name)
      return connection.call_for<protocol::Done>(protocol::DestroyPool{pool.pool}).status();
  return {ErrorCode::kNotFound, "tenant \"" + target.tenant + "\" has no pool \"" + name + "\""};
}

}  // namespace larder::ctl
