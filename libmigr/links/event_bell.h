/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * An asynchronous event that the application's own device does not raise: whoever waits for one in the kernel is woken by a *bell*, a
 * CQ of one entry on that device, which we let overrun by a QP in ERR. That needs no link, and its event comes over the application's
 * own descriptor (events.h). Of the Registry's lock.
 */
#ifndef MIGR_LINKS_EVENT_BELL_H
#define MIGR_LINKS_EVENT_BELL_H

#include <infiniband/verbs.h>

#include <string>

namespace migr {
struct Context;
}

namespace migr::links {

struct EventBell {
  ibv_cq* cq = nullptr;  ///< null: it has not been rung
  ibv_qp* qp = nullptr;
};

/// @param pd    the application's
/// @param port  of its device
/// @param event as the application knows it
/// @return "" or why nobody is told
std::string ring(EventBell& bell, Context& context, ibv_pd* pd, unsigned port, const ibv_async_event& event);
/// The event was not taken yet.
bool rings(const EventBell& bell);
/// Such an event comes without it.
void remove(EventBell& bell, Context& context);

}  // namespace migr::links

#endif
