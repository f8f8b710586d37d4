/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The limit of an SRQ (IBV_EVENT_SRQ_LIMIT_REACHED) while its receives are not all on the application's own device: no device
 * counts all of them, and a loop uses up some there that nobody has got. The device's limit is off meanwhile, and we count. The event
 * comes by a bell (event_bell.h).
 */
#ifndef MIGR_LINKS_SHARED_LIMIT_H
#define MIGR_LINKS_SHARED_LIMIT_H

#include <cstdint>

#include "../shadow.h"

namespace migr::links {

/// The application has armed one that we count for (SrqShadow::armed), or disarmed it. Needs no lock.
void limit_set();

/* Caller holds s.lock; of s.link, where it is not said otherwise. */

/// We count from now on, if we did not.
void count_here(SrqShadow& s);
/// The device counts again: all receives are there.
void let_device_count(SrqShadow& s);
/// The device has been, or is about to be, armed by others. Also without s.link
void count_at_device(SrqShadow& s);
/// We count, and there is something to count for.
bool watches_limit(const SrqShadow& s);
/// Tells, if it is time. @return ms until the next look; 0: none is needed
unsigned look_at_limit(SrqShadow& s);

}  // namespace migr::links

#endif
