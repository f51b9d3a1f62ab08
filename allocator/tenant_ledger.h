// Who may take how much memory, and who has taken how much.
//
// A tenant's guarantee is never lent: what it has not taken of it is kept free for it. Above its
// guarantee a tenant takes what is left, up to its maximum. Deterministic; knows bytes only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "allocator/events.h"
#include "larder/status.h"

namespace larder {

class ByteReader;
class ByteWriter;

class TenantLedger {
 public:
  struct Tenant {
    std::string salt;
    int64_t guaranteed_bytes = 0;
    int64_t maximum_bytes = 0;  // 0: none
    int64_t used_bytes = 0;
    // What others cannot have: the guarantee, or what is taken where that is more.
    int64_t kept_bytes() const { return std::max(guaranteed_bytes, used_bytes); }
  };

  // Sizes count as at most 1 PiB, and tenants past the 4096th are unknown.
  void configure(const Configure& event);
  bool knows(const std::string& tenant) const { return tenants_.contains(tenant); }
  const Tenant& at(const std::string& tenant) const { return tenants_.at(tenant); }
  const std::map<std::string, Tenant>& tenants() const { return tenants_; }
  int64_t memory_bytes() const { return memory_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }

  // What the tenant may take now, never negative.
  int64_t available_bytes(const std::string& tenant) const;
  // What bounds the tenant, in words: "limit 1000 of tenant "a" (maximum)".
  std::string limit_text(const std::string& tenant) const;
  // RESOURCE_EXHAUSTED unless all guarantees and what is taken fit.
  Status check_quota(const std::string& tenant, int64_t guaranteed_bytes,
                     int64_t maximum_bytes) const;
  void set_quota(const std::string& tenant, int64_t guaranteed_bytes, int64_t maximum_bytes);

  void take(const std::string& tenant, int64_t bytes);
  void give_back(const std::string& tenant, int64_t bytes);

  void save(ByteWriter& out) const;
  bool load(ByteReader& in);
  void check_consistency() const;  // LARDER_ENSURE

 private:
  int64_t kept_for_others(const std::string& tenant) const;
  void recount();

  int64_t memory_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t kept_bytes_ = 0;  // of all tenants
  std::map<std::string, Tenant> tenants_;
};

}  // namespace larder
