// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "host_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "facts.h"
#include "kernel_record.h"
#include "path_trial.h"

namespace migr {

wire::VersionReply version_of(const Config& config, std::size_t sessions, const Certificates* certificates) {
  wire::VersionReply v;
  v.set_wire(kWireVersion);
  v.set_proc(MIGR_PROC_VERSION);
  v.set_release(kRelease);
  v.set_name(config.name);
  v.set_sessions(static_cast<std::uint32_t>(sessions));
  if (certificates) v.set_certificate_refused(certificates->refused());
  if (auto k = KernelRecord::open())
    if (auto i = k->info()) v.set_abi(i->abi);
  return v;
}

Status same_version(const char* what, std::uint32_t theirs, std::uint32_t ours) {
  if (theirs == ours) return {};
  return Error{EBUSY, std::string(what) + " version " + std::to_string(ours) + " here, " + std::to_string(theirs) + " there; install the same release on both hosts"};
}

grpc::Status HostService::Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) {
  *out = version_of(config_, sessions_.all().size(), certificates_);
  return grpc::Status::OK;
}

grpc::Status HostService::Facts(grpc::ServerContext*, const wire::FactsRequest* r, wire::HostFacts* out) {
  *out = facts_of(config_, version_of(config_, sessions_.all().size(), certificates_), r->image_bytes());
  return grpc::Status::OK;
}

grpc::Status HostService::GetOutcome(grpc::ServerContext* ctx, const wire::Migration* m, wire::OutcomeReply* out) {
  for (Role* r : roles_) {
    *out = r->outcome(m->id());
    if (out->outcome() == wire::UNKNOWN) {
      if (auto s = r->readable(m->id()); !s) return to_grpc(s);
      continue;
    }
    if (!r->has_part(m->id(), {*ctx, config_})) out->clear_keys(), out->clear_keys_known();
    break;
  }
  return grpc::Status::OK;
}

grpc::Status HostService::Renew(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  const LogScope log(log_fields_of(*ctx, config_, m->id()));
  const auto s = coordinated(m->id(), {*ctx, config_});
  if (s && traffic_) traffic_->look_closely();
  return to_grpc(s);
}

Status HostService::coordinated(std::uint32_t id, const Caller& who) {
  Status first = Error{ENOENT, "no open migration of that number here"};
  for (Role* r : roles_) {
    const auto s = r->renew(id, who);
    if (s || (!first && first.error().code == ENOENT)) first = s;
  }
  return first;
}

namespace {

/// Cancels a call that takes longer: who waits in it for the caller's next word goes on.
class CallLimit {
 public:
  CallLimit(grpc::ServerContext& ctx, int ms)
      : thread_([this, &ctx, ms](const std::stop_token& ended) {
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, ended, std::chrono::milliseconds(ms), [&] { return ended.stop_requested(); })) return;
          ctx.TryCancel();
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::jthread thread_;
};

class PlaceForTrial {
 public:
  explicit PlaceForTrial(std::counting_semaphore<kTrialsMax>& places) : places_(places), has_(places.try_acquire()) {}
  PlaceForTrial(const PlaceForTrial&) = delete;
  ~PlaceForTrial() {
    if (has_) places_.release();
  }
  explicit operator bool() const { return has_; }

 private:
  std::counting_semaphore<kTrialsMax>& places_;
  const bool has_;
};

}  // namespace

grpc::Status HostService::TryPaths(grpc::ServerContext* ctx, grpc::ServerReaderWriter<wire::TrialStep, wire::TrialStep>* stream) {
  const CallLimit limit(*ctx, kCheckMs + kTrialMs);
  wire::TrialStep request;
  if (!stream->Read(&request)) return {grpc::StatusCode::INVALID_ARGUMENT, "TryPaths without a step"};
  const LogScope log(log_fields_of(*ctx, config_, request.id()));
  const Caller who(*ctx, config_);
  if (auto s = request.id() ? coordinated(request.id(), who) : may(config_, who, Right::kRead); !s) return to_grpc(s);
  // Those of a migration are as many as it has partners, and who may have them was asked above.
  std::optional<PlaceForTrial> place;
  if (!request.id() && !place.emplace(trials_)) return {grpc::StatusCode::RESOURCE_EXHAUSTED, config_.name + " tries " + std::to_string(kTrialsMax) + " sets of paths already; try again"};
  const auto trial = trial_of_host();
  do {
    const auto answer = trial->step(request);
    if (!answer) return to_grpc(answer);
    if (!stream->Write(*answer)) break;
  } while (stream->Read(&request));
  return grpc::Status::OK;
}

// Who may switch connections here could break them anyway; of others only the host that it went to from here.
Status HostService::may_release(const Caller& who, const Instance& i) const {
  const auto away = numbers_.away_at(i);
  if (!away) return away.error();
  if (!*away || who.is(**away)) return {};
  return may(config_, who, Right::kPartner);
}

grpc::Status HostService::Release(grpc::ServerContext* ctx, const wire::ReleaseRequest* r, wire::Empty*) {
  const Caller who(*ctx, config_);
  std::vector<Instance> instances;
  bool leaving = false;
  Status refused;
  for (const auto& bytes : r->instances()) {
    const auto i = instance_of(bytes);
    if (!i) return to_grpc(i);
    // Its numbers will be reserved in a moment, and nobody would tell of its end any more.
    if (std::any_of(roles_.begin(), roles_.end(), [&](Role* role) { return role->claims(*i); }))
      leaving = true;
    else if (auto s = may_release(who, *i); !s) {
      refused = Error{s.error().code, "numbers of a process that has not gone to it stay reserved: " + s.error().text};
      if (said_.due(who.name() + hex(*i))) spdlog::warn("refused: {}", refused.error().text);
    } else
      instances.push_back(*i);
  }
  const Status s = numbers_.release(instances);
  if (s && !refused) return to_grpc(refused);
  return to_grpc(s && leaving ? Error{EBUSY, "the migration in which it left is not finished here"} : s);
}

grpc::Status HostService::Traffic(grpc::ServerContext*, const wire::TrafficRequest* r, wire::TrafficReply* out) {
  if (traffic_) *out = traffic_->since(r->back_ms());
  return grpc::Status::OK;
}

}  // namespace migr
