// The daemon's answers as text for people and as JSON for programs, with the same names.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "larder/status.h"
#include "protocol/messages.h"

namespace larder::ctl {

nlohmann::json to_json(const protocol::DaemonStatus& status);
nlohmann::json to_json(const std::vector<protocol::PoolInfo>& pools);
nlohmann::json to_json(const std::vector<protocol::SessionInfo>& sessions);
nlohmann::json to_json(const protocol::Capabilities& capabilities);
nlohmann::json to_json(const std::vector<protocol::TenantInfo>& tenants);
nlohmann::json to_json(const protocol::Resized& resized);
nlohmann::json to_json(const Status& refusal);

std::string to_text(const protocol::DaemonStatus& status);
std::string to_text(const std::vector<protocol::PoolInfo>& pools);
std::string to_text(const std::vector<protocol::SessionInfo>& sessions);
std::string to_text(const protocol::Capabilities& capabilities);
std::string to_text(const std::vector<protocol::TenantInfo>& tenants);
std::string to_text(const protocol::Resized& resized);

}  // namespace larder::ctl
