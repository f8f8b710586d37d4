// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Fault points, for tests only. Each step of docs/protocol.md has two, STEP.begin and STEP.end, on the host that does it.
// Environment MIGR_FAULT=POINT:ACTION[,POINT:ACTION..] of migrd; ACTION is one of
//   fail        an error, each time          fail-once   an error, the first time
//   exit        migrd dies                   sleep=S     S seconds late
//   hang        the first time kFaultHangMs late: whoever waits for it has to give up before
//   while=FILE  makes FILE, and goes on when it is gone again, kFaultHangMs late at most
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "status.h"

namespace migr {

// Every step that can be made to fail. Those of the source are its coordinator's phases, then its own deeds, then its
// way back. `migrd --list-faults` prints them in this order.
#define MIGR_FAULT_STEPS(X)                                                                                      \
  X(kSourceCheck, "source.check") X(kSourceRecord, "source.record") X(kSourcePrepare, "source.prepare")          \
  X(kSourceConnect, "source.connect") X(kSourcePreCopy, "source.pre-copy") X(kSourceSuspend, "source.suspend")   \
  X(kSourceDrain, "source.drain") X(kSourceCut, "source.cut") X(kSourceSettle, "source.settle")                  \
  X(kSourceFreeze, "source.freeze") X(kSourceDetach, "source.detach") X(kSourceCheckpoint, "source.checkpoint")  \
  X(kSourceCreate, "source.create") X(kSourceCopy, "source.copy") X(kSourceCompare, "source.compare")            \
  X(kSourceReady, "source.ready") X(kSourceCommit, "source.commit") X(kSourceDecide, "source.decide")            \
  X(kSourceResume, "source.resume") X(kSourceDestroy, "source.destroy") X(kSourceBack, "source.back")            \
  X(kSourceThaw, "source.thaw") X(kSourceAttach, "source.attach") X(kSourceReconnect, "source.reconnect")        \
  X(kDestinationCheck, "destination.check") X(kDestinationPrepare, "destination.prepare")                        \
  X(kDestinationCreate, "destination.create") X(kDestinationConnect, "destination.connect")                      \
  X(kDestinationMoves, "destination.moves") X(kDestinationUpload, "destination.upload")                          \
  X(kDestinationAttach, "destination.attach") X(kDestinationRestore, "destination.restore")                      \
  X(kDestinationReady, "destination.ready") X(kDestinationCommit, "destination.commit")                          \
  X(kDestinationMark, "destination.mark") X(kDestinationRebind, "destination.rebind")                            \
  X(kDestinationResume, "destination.resume") X(kDestinationAbort, "destination.abort")                          \
  X(kPartnerFind, "partner.find") X(kPartnerPrepare, "partner.prepare") X(kPartnerCreate, "partner.create")      \
  X(kPartnerConnect, "partner.connect") X(kPartnerMoves, "partner.moves") X(kPartnerTrack, "partner.track")      \
  X(kPartnerSuspend, "partner.suspend")                                                                          \
  X(kPartnerDrain, "partner.drain") X(kPartnerCut, "partner.cut") X(kPartnerSettle, "partner.settle")            \
  X(kPartnerSwitch, "partner.switch") X(kPartnerKeys, "partner.keys") X(kPartnerResume, "partner.resume")        \
  X(kPartnerOldPath, "partner.old-path") X(kPartnerRollback, "partner.rollback")

enum class FaultStep {
#define X(id, name) id,
  MIGR_FAULT_STEPS(X)
#undef X
};

inline constexpr std::string_view kFaultSteps[] = {
#define X(id, name) name,
    MIGR_FAULT_STEPS(X)
#undef X
};

/// @return what is wrong with a MIGR_FAULT: a point or an action that does not exist
Status check_faults(const std::string& spec);

enum class FaultAt { kBegin, kEnd };
/// Does what `spec` says for this point.
Status fault(const std::string& spec, FaultStep step, FaultAt at);

/// A step between its two points.
template <class F>
Status fault_step(const std::string& spec, FaultStep step, F&& work) {
  if (auto s = fault(spec, step, FaultAt::kBegin); !s) return s;
  if (Status s = std::forward<F>(work)(); !s) return s;
  return fault(spec, step, FaultAt::kEnd);
}

}  // namespace migr
