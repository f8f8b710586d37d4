/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What the files of the control path (preload.cc, srq.cc, slots.cc) share: from the application's object to its shadow, and
 * from a new object of the provider's to a shadow. */
#ifndef MIGR_OBJECTS_H
#define MIGR_OBJECTS_H

#include <cerrno>
#include <functional>

#include "events.h"
#include "shadow.h"

#define MIGR_EXPORT extern "C" [[gnu::visibility("default")]]

namespace migr {

/// The shadow, or null: of a context that libmigr does not have (imported, MIGR_DISABLE), or of a maker that it does not know. Caller holds the Registry's lock.
MrShadow* known(Registry& registry, ibv_mr* mr);
QpShadow* known(Registry& registry, ibv_qp* qp);
CqShadow* known(Registry& registry, ibv_cq* cq);
SrqShadow* known(Registry& registry, ibv_srq* srq);

/// Something is, or was, called by a key with this index that its device calls otherwise: also of another context of the device, whose keys
/// backup links tell in one (links_wire.h). Caller holds the Registry's lock.
bool is_name(const Registry& registry, const Context& context, std::uint32_t key);

/// The provider's object behind one of the application's, which must be of a context of ours; null for null.
inline ibv_cq* real_cq(ibv_cq* cq) { return cq ? shadow_of(cq).real : nullptr; }
inline ibv_srq* real_srq(ibv_srq* srq) { return srq ? shadow_of(srq).real : nullptr; }

/// Makes the shadow of `mr`, or undoes the registration and sets errno. Caller holds the Registry's lock.
/// @param movable false: registered in a way that cannot be repeated
ibv_mr* adopt_mr(Registry& registry, Context& context, ibv_mr* mr, int access, std::uint64_t iova, bool movable);

/// Turns a new real QP, whose qp_context is `shadow`, into it. shadow.init says with what it was made; its CQs and SRQ
/// are the application's. Caller holds the Registry's lock.
ibv_qp* adopt_qp(Registry& registry, Context& context, QpShadow& shadow, ibv_qp* qp);

/// Makes an object by `create`, which is given attributes with the provider's objects and our context pointer, and its
/// shadow. `attr`: the application's, of which only cap changes. A context that is not ours: `create` alone.
ibv_cq_ex* create_cq_with(ibv_context* ctx, ibv_cq_init_attr_ex& attr,
                          const std::function<ibv_cq_ex*(ibv_cq_init_attr_ex*)>& create);
ibv_qp* create_qp_with(ibv_context* ctx, ibv_qp_init_attr_ex& attr,
                       const std::function<ibv_qp*(ibv_qp_init_attr_ex*)>& create);

/// Our functions in the slots of `ctx` that name a shadow or make an object that needs one.
void install_slots(Context& context, ibv_context& ctx);
/// A PD was given back; it may have been a parent domain. Caller holds the lock.
void parent_domain_gone(Registry& registry, const ibv_pd* pd);
/// Its context is closed: the kernel closes them with it.
void xrc_domains_gone(Registry& registry, const Context& context);
/// The slots and the op of SRQs.
void install_srq(Context& context, ibv_context& ctx);

/// A call that goes to the driver without the lock: FREEZE waits for its end. Caller holds the lock.
class Registering {
 public:
  explicit Registering(Registry& registry) : registry_(registry) {
    ++registry_.registering;
    ++registry_.registrations;
  }
  Registering(const Registering&) = delete;
  ~Registering() {
    --registry_.registering;
    if (registry_.closing) registry_.thawed.notify_all();
  }

 private:
  Registry& registry_;
};

/// Pinning memory, and giving it back, takes its time, and programs with much of it do that with several threads; so does asking who has an
/// address, where nobody answers.
template <class Call>
auto without_lock(std::unique_lock<std::mutex>& guard, Call&& call) {
  guard.unlock();
  const auto result = call();
  const int saved = errno;
  guard.lock();
  errno = saved;
  return result;
}

/// Asynchronous events are acknowledged to libibverbs as soon as they are read, because the real object may be replaced
/// before the application acknowledges them. Destroying waits for the application here, without the Registry's lock.
template <class Shadow>
void wait_for_acks(Registry& registry, Shadow& shadow) {
  const NoCancel no_cancel;
  std::unique_lock guard(registry.events_lock);
  registry.event_acked.wait(guard, [&] { return shadow.unacked_events == 0; });
}

/// Nothing is told of it any more; the shadow may be deleted.
template <class Shadow>
void forget_shadow(Registry& registry, Shadow& shadow) {
  events::forget(&shadow.app);
  wait_for_acks(registry, shadow);
  std::lock_guard guard(registry.events_lock);
  registry.shadows.erase(&shadow.app);
}

/// Before an object goes: who handles an event of it may still ask for it. What comes meanwhile is waited for as above.
template <class Object>
void wait_for_handlers(Registry& registry, Object* object) {
  std::unique_lock guard(registry.lock);
  auto* const shadow = known(registry, object);
  guard.unlock();
  if (shadow) wait_for_acks(registry, *shadow);
}

}  // namespace migr

#endif
