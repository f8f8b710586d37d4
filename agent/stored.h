// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A checkpoint on disk: for the coordinator a destination that only keeps what it is given, and later a source that has
// stopped long ago.
//
//   DIR (0700)/checkpoint.json   what the coordinator has to know of it
//             /images            as a destination gets them (0600: they hold memory and keys), and the names in its root filesystem
//             /bundle            of a container; its own mode is in the manifest
#pragma once

#include "coordinator.h"
#include "source_host.h"

namespace migr {

/// `migrctl checkpoint`. DIR appears when all of it is on the disk.
class KeepingDestination final : public DestinationLink {
 public:
  /// @param info     of what is stored, once the coordinator has asked for it
  /// @param made_in  where the source has its images meanwhile; empty: that takes no room
  KeepingDestination(std::string dir, const ContainerInfo& info, std::string made_in = {}) : dir_(std::move(dir)), part_(dir_ + ".part"), made_in_(std::move(made_in)), info_(info) {}
  /// For a migrd that was started again: only commit(), outcome() and abort() may be called.
  explicit KeepingDestination(std::string dir) : KeepingDestination(std::move(dir), nothing()) {}
  ~KeepingDestination() override;
  Status check(const wire::CheckRequest& r) override;
  Result<wire::PrepareReply> prepare(const wire::PrepareHeader& h, const std::string& folder, Sent& total) override;
  Result<wire::PrepareReply> create(std::uint32_t) override { return wire::PrepareReply(); }
  Status connect(const wire::ConnectRequest&) override { return {}; }
  Status upload(std::uint32_t id, const std::string& folder, unsigned pre_copy_round, const Written& written, Sent& total) override;
  bool bundle_changes() const override { return !root_.empty(); }
  Status upload_changes(std::uint32_t, Sent& total) override;
  Status attach_network(std::uint32_t) override { return {}; }
  Status full_restore(std::uint32_t) override { return {}; }
  Status ready(std::uint32_t) override;
  Status commit(std::uint32_t) override;
  Result<wire::CommitReply> rebind(std::uint32_t) override { return wire::CommitReply(); }
  Result<wire::ResumeReply> resume(std::uint32_t) override { return wire::ResumeReply(); }
  Status abort(std::uint32_t) override;
  Result<wire::Outcome> outcome(std::uint32_t) override;
  Status renew(std::uint32_t) override { return {}; }

 private:
  static const ContainerInfo& nothing();
  Status copy_changes(const std::string& in, Sent& total);
  const std::string dir_, part_, made_in_;
  const ContainerInfo& info_;
  std::string bundle_, root_;  // and of it what the container may write to
  SentFiles sent_;             // of the bundle
  bool writes_ = false;        // to part_, which nobody else does until this is gone
};

/// `migrctl restore`. What is stored stays.
class StoredSource final : public Source {
 public:
  StoredSource(SourceHost& host, std::uint32_t id) : host_(host), id_(id) {}
  /// `dir` stands for the container. EPERM: others may read it; EINVAL: it is no checkpoint, or of another release.
  Result<ContainerInfo> inspect(const std::string& dir) override;
  Result<std::string> record(const std::string& destination, const std::vector<std::string>& partners) override;
  Status may_pre_dump() override { return Error{ENOTSUP, "it is stored already"}; }
  Result<std::string> pre_dump(unsigned) override { return may_pre_dump().error(); }
  Status checkpoint_after(unsigned) override { return {}; }
  Result<std::uint64_t> drop_unchanged() override { return 0; }
  Result<wire::MovesRequest> moves(const wire::PrepareReply& prepared) override;
  Status track() override { return {}; }
  void get_ready() override {}
  Status suspend() override { return {}; }
  Result<wire::DrainReply> drain(int, const std::set<std::size_t>&) override { return wire::DrainReply(); }
  Result<wire::CutReply> cut(const wire::CutRequest&) override { return Error{ENOTSUP, "it is stored already"}; }
  Result<wire::SettleReply> settle(const wire::SettleRequest&) override { return Error{ENOTSUP, "it is stored already"}; }
  Status rollback() override { return {}; }
  Status freeze(const NicWrites*) override { return {}; }
  Status reconnect() override { return {}; }
  Status detach_network() override { return {}; }
  Status attach_network() override { return {}; }
  Status checkpoint() override;
  Status thaw() override { return {}; }
  Status decide(wire::Outcome outcome) override;
  Status destroy() override { return {}; }
  void forget(bool settled) override;

 private:
  SourceHost& host_;
  const std::uint32_t id_;
  std::string dir_;
  ContainerInfo info_;
};

}  // namespace migr
