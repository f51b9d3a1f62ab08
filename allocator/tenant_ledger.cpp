#include "allocator/tenant_ledger.h"

#include <algorithm>

#include "allocator/byte_codec.h"
#include "allocator/consistency.h"
#include "larder/check.h"

namespace larder {

namespace {

// Sums of a few thousand of these do not overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 50;
constexpr size_t kMaxTenants = 4096;

int64_t clamped(int64_t bytes) { return std::clamp<int64_t>(bytes, 0, kMaxBytes); }

}  // namespace

void TenantLedger::configure(const Configure& event) {
  memory_bytes_ = clamped(event.memory_bytes);
  for (auto& [name, tenant] : tenants_) tenant.guaranteed_bytes = 0;
  for (const TenantSpec& spec : event.tenants) {
    if (!knows(spec.name) && tenants_.size() == kMaxTenants) continue;
    Tenant& tenant = tenants_[spec.name];
    if (tenant.salt.empty()) tenant.salt = spec.salt;
    tenant.guaranteed_bytes = clamped(spec.guaranteed_bytes);
    tenant.maximum_bytes = clamped(spec.maximum_bytes);
  }
  recount();
}

void TenantLedger::recount() {
  used_bytes_ = 0;
  kept_bytes_ = 0;
  for (const auto& [name, tenant] : tenants_) {
    used_bytes_ += tenant.used_bytes;
    kept_bytes_ += tenant.kept_bytes();
  }
}

int64_t TenantLedger::kept_for_others(const std::string& name) const {
  return kept_bytes_ - at(name).kept_bytes();
}

int64_t TenantLedger::available_bytes(const std::string& name) const {
  const Tenant& tenant = at(name);
  int64_t available = memory_bytes_ - kept_for_others(name) - tenant.used_bytes;
  if (tenant.maximum_bytes > 0)
    available = std::min(available, tenant.maximum_bytes - tenant.used_bytes);
  return std::max<int64_t>(available, 0);
}

std::string TenantLedger::limit_text(const std::string& name) const {
  const Tenant& tenant = at(name);
  const int64_t rest = std::max<int64_t>(memory_bytes_ - kept_for_others(name), 0);
  if (tenant.maximum_bytes > 0 && tenant.maximum_bytes < rest)
    return "limit " + std::to_string(tenant.maximum_bytes) + " bytes (maximum of tenant \"" + name +
           "\"), used " + std::to_string(tenant.used_bytes);
  return "limit " + std::to_string(rest) + " of " + std::to_string(memory_bytes_) +
         " bytes (the rest is others'), used " + std::to_string(tenant.used_bytes);
}

Status TenantLedger::check_quota(const std::string& name, int64_t guaranteed_bytes,
                                 int64_t maximum_bytes) const {
  const auto found = tenants_.find(name);
  if (found == tenants_.end())
    return {ErrorCode::kNotFound, "tenant \"" + name + "\" is not configured"};
  if (guaranteed_bytes < 0 || maximum_bytes < 0 ||
      (maximum_bytes > 0 && maximum_bytes < guaranteed_bytes))
    return {ErrorCode::kInvalidArgument,
            "guaranteed_bytes is " + std::to_string(guaranteed_bytes) + " and maximum_bytes " +
                std::to_string(maximum_bytes) +
                ", but neither may be negative, and a maximum not below the guarantee"};
  const int64_t available = memory_bytes_ - kept_for_others(name);
  if (std::max(guaranteed_bytes, found->second.used_bytes) > available)
    return {ErrorCode::kResourceExhausted,
            "requested a guarantee of " + std::to_string(guaranteed_bytes) + " bytes, available " +
                std::to_string(std::max<int64_t>(available, 0)) + " of " +
                std::to_string(memory_bytes_) + ": the rest is guaranteed to others or taken"};
  return {};
}

void TenantLedger::set_quota(const std::string& name, int64_t guaranteed_bytes,
                             int64_t maximum_bytes) {
  Tenant& tenant = tenants_.at(name);
  tenant.guaranteed_bytes = guaranteed_bytes;
  tenant.maximum_bytes = maximum_bytes;
  recount();
}

void TenantLedger::take(const std::string& name, int64_t bytes) {
  Tenant& tenant = tenants_.at(name);
  kept_bytes_ -= tenant.kept_bytes();
  tenant.used_bytes += bytes;
  used_bytes_ += bytes;
  kept_bytes_ += tenant.kept_bytes();
}

void TenantLedger::give_back(const std::string& name, int64_t bytes) {
  Tenant& tenant = tenants_.at(name);
  LARDER_CHECK(tenant.used_bytes >= bytes, name, tenant.used_bytes, bytes);
  kept_bytes_ -= tenant.kept_bytes();
  tenant.used_bytes -= bytes;
  used_bytes_ -= bytes;
  kept_bytes_ += tenant.kept_bytes();
}

void TenantLedger::save(ByteWriter& out) const {
  out.put(memory_bytes_);
  out.put(static_cast<uint32_t>(tenants_.size()));
  for (const auto& [name, tenant] : tenants_) {
    out.put_text(name);
    out.put_text(tenant.salt);
    out.put(tenant.guaranteed_bytes);
    out.put(tenant.maximum_bytes);
    out.put(tenant.used_bytes);
  }
}

bool TenantLedger::load(ByteReader& in) {
  memory_bytes_ = in.get<int64_t>();
  const size_t count = in.count_of(32);
  for (size_t i = 0; i < count; ++i) {
    const std::string name = in.get_text();
    Tenant& tenant = tenants_[name];
    tenant.salt = in.get_text();
    tenant.guaranteed_bytes = in.get<int64_t>();
    tenant.maximum_bytes = in.get<int64_t>();
    tenant.used_bytes = in.get<int64_t>();
    for (const int64_t bytes : {tenant.guaranteed_bytes, tenant.used_bytes})
      if (bytes != clamped(bytes)) return false;
    if (tenant.maximum_bytes < 0) return false;
  }
  if (in.failed() || memory_bytes_ != clamped(memory_bytes_) || count > kMaxTenants) return false;
  recount();
  return true;
}

void TenantLedger::check_consistency() const {
  int64_t kept = 0;
  for (const auto& [name, tenant] : tenants_) kept += tenant.kept_bytes();
  LARDER_ENSURE(kept == kept_bytes_, kept, kept_bytes_);
}

}  // namespace larder
