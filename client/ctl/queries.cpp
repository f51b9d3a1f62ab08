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

Result<std::vector<protocol::TenantInfo>> list_tenants(ControlConnection& connection) {
  auto all = connection.call_for<protocol::Tenants>(protocol::ListTenants{});
  if (!all) return all.status();
  return std::move(all->tenants);
}

namespace {

Result<protocol::PoolInfo> find_pool(ControlConnection& connection, const Target& target,
                                     const std::string& name) {
  auto pools = list_pools(connection);
  if (!pools) return pools.status();
  for (protocol::PoolInfo& pool : *pools)
    if (pool.tenant == target.tenant && pool.name == name) return std::move(pool);
  return Status(ErrorCode::kNotFound,
                "tenant \"" + target.tenant + "\" has no pool \"" + name + "\"");
}

Result<uint32_t> find_group(const protocol::PoolInfo& pool, const std::string& group) {
  std::string names;
  for (size_t i = 0; i < pool.groups.size(); ++i) {
    const bool is_first = i == 0 && group.empty();
    if (is_first || pool.groups[i].name == group || std::to_string(i) == group)
      return static_cast<uint32_t>(i);
    names += (i == 0 ? "" : ", ") + pool.groups[i].name;
  }
  return Status(ErrorCode::kNotFound, "pool \"" + pool.name + "\" has no group \"" + group +
                                          "\": its groups are " + names);
}

}  // namespace

Result<protocol::Resized> resize_pool(ControlConnection& connection, const Target& target,
                                      const std::string& name, const std::string& group,
                                      int64_t num_blocks) {
  const auto pool = find_pool(connection, target, name);
  if (!pool) return pool.status();
  const auto index = find_group(*pool, group);
  if (!index) return index.status();
  return connection.call_for<protocol::Resized>(
      protocol::ResizePool{pool->pool, *index, num_blocks});
}

Result<protocol::Resized> evict(ControlConnection& connection, const Target& target,
                                const std::string& name, int64_t num_blocks) {
  const auto pool = find_pool(connection, target, name);
  if (!pool) return pool.status();
  return connection.call_for<protocol::Resized>(protocol::Evict{pool->pool, num_blocks});
}

Status destroy_pool(ControlConnection& connection, const Target& target, const std::string& name) {
  const auto pool = find_pool(connection, target, name);
  if (!pool) return pool.status();
  return connection.call_for<protocol::Done>(protocol::DestroyPool{pool->pool}).status();
}

}  // namespace larder::ctl
