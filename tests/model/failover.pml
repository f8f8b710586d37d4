/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
 *
 * One vQP between two ends, and the links that can carry it: docs/failover.md as guarded steps. README.md says what is
 * modelled and what is not; `run` sets the configurations and the mutants, at run time (conf() below).
 *
 *	end A = 0                               end B = 1
 *	posts WRs 0..wrs[0]-1 --- path on link 0 --- executes them
 *	executes              --- path on link 1 --- posts WRs 0..wrs[1]-1
 *	                      === channel per link ===
 *
 * The work requests of an end are numbered in the order in which they land in a queue, whichever queue; that order is the
 * posting order. Masks have one bit per work request. A path is one pair of physical QPs, used once; what its
 * responder has executed (the mask x) stands for the PSN. One process takes every step, so all interleavings are there;
 * there is no progress label, so a run without a non-progress cycle is a state graph without a cycle: every run ends.
 */

#ifndef NL
#define NL 2			/* links */
#endif
#ifndef NG
#define NG 6			/* paths that can be made on one link, one after another */
#endif
#ifndef DEPTH
#define DEPTH 4			/* messages that wait in a channel */
#endif
#ifndef MAX_CHANGES
#define MAX_CHANGES 9		/* of the path; more than these: somebody runs in a circle */
#endif

#ifdef SHORTEST			/* spin looks for the shortest trail only without hidden variables */
#define HIDDEN
#else
#define HIDDEN hidden
#endif

/* The configuration; constant once a run has begun. [0] is A's, [1] is B's. */
HIDDEN byte wrs[2];		/* work requests */
HIDDEN byte sends[2], reads[2], atomics[2];	/* which of them are; the others are WRITEs */
HIDDEN byte exact;		/* the policy: mask of ends that have exact; the others have resend */
HIDDEN byte once;		/* mask of ends that are judged as exact */
HIDDEN byte quiet;		/* nothing is wrong: nobody may get an error */
HIDDEN byte one_way;		/* a link may die in one direction only */
HIDDEN byte late;		/* mask of ends with a thread that passes the check and posts whenever it likes */
HIDDEN byte later[2];		/* receives that are posted at any time, not before everything else */
HIDDEN byte ahead;		/* the first path of every other link is there at the beginning */
HIDDEN byte by_message;		/* paths are made by messages, not by both ends in one step */
HIDDEN byte blind;		/* mask of ends without heartbeat: they see their own errors and limits only */
HIDDEN byte mutant;

/* What is broken on purpose. `run` reads this list. */
#define M_RECV_AFTER_STATE	1	/* receives are posted to the new path after STATE */
#define M_NO_PSN		2	/* settles as if nothing had been executed */
#define M_ALL_EXECUTED		3	/* settles as if everything had been executed */
#define M_NO_EPOCH_CHECK	4	/* any STATE is taken for the one that is waited for */
#define M_NO_WAIT		5	/* replays without the other's STATE */
#define M_NOT_FLUSHED		6	/* STATE is told before the device has stopped executing */
#define M_OWN_UNSETTLED		7	/* STATE tells what its sender has not settled, not what the other may not have */
#define M_EPOCH_WITHOUT_LINK	8	/* two ends may mean different links by one epoch */
#define M_PATH_ONCE		9	/* a link whose path was used up counts as gone although its channel stands */
#define M_ANY_PATH		10	/* STATE does not name its path */
#define M_REUSE			11	/* a path that was cut is reset and used again */
#define M_NOT_GONE		12	/* who gives up does not say so */
#define M_ECHO			13	/* GONE is answered with GONE */
#define M_HELD_OPEN		14	/* the channel of a link that is held for down is still listened to */
#define M_TRAP_DROPPED		15	/* what was flushed late is lost */
#define M_TRAP_LATER		16	/* a post does not look into the trap first */
#define M_RESEND_AS_EXACT	17	/* resend, judged as exact */
#define M_READ_DONE		18	/* a READ that was executed counts as completed */
#define M_DRAIN_ALONE		19	/* cuts when it is drained itself */
#define M_DRAIN_UNSEEN		20	/* drained is said while a thread may still post */
#define M_DRAIN_FROM_ANY	21	/* DRAIN does not say which epoch it leaves */
#define M_DRAIN_KEEPS_RECV	22	/* receives are kept while a path is drained */
#define M_DRAIN_FIRST		23	/* of two drains to different links each end stays with its own (3 links) */
#define M_PATH_ASKED_ONCE	24	/* a number that was asked for on a channel that broke counts as made */
#define M_DRAIN_OUT_ALONE	25	/* an end that has said DRAINED goes on without a word of the other one */
#define M_DRAIN_REJOINED	26	/* a drain that has ended here is begun again by what was said in it */
#define IS(m)			(mutant == (m))

/* What has to be possible: with one of these a run that ends so counts as the violation that has to be found. */
#define P_TWO_CHANGES		101	/* all is done, after two changes of path at each end */
#define P_KNOWN_ONLY		102	/* all is done, and of something only STATE told it */
#define P_NOTHING_WRONG		103	/* all is done, on another link although nothing had failed */
#define P_ERRORS		104	/* both ends have errors */
#define P_SAVED_BY_A_NEW_PATH	105	/* all is done, on a second path of the link of the first */

#define NAME(i)		(65 + (i))
#define BIT(n)		(1 << (n))
#define UPTO(n)		(BIT(n) - 1)
#define LOW(m)		((m) & 1 -> 0 : ((m) & 2 -> 1 : ((m) & 4 -> 2 : 3)))
#define ONES(m)		(((m) & 1) + (((m) >> 1) & 1) + (((m) >> 2) & 1) + (((m) >> 3) & 1))
#define OTHER(i)	(1 - (i))
#define NONE		(NL * NG)		/* no path */
#define LINK_OF(p)	((p) / NG)

/* The number of an epoch names its link: the ends never mean different links by one number. */
#define LINK(e)		((e) % NL)
#define COUNT(e)	((e) / NL)
#define KEY(e)		(IS(M_EPOCH_WITHOUT_LINK) -> COUNT(e) : (e))

mtype = { STATE, PATH, GONE, DRAIN, DRAINED, OFF };

#define RUN		0	/* posts go to the path */
#define DRAINING	1	/* sends are kept; the path still works off what it has */
#define CUT		2	/* the old path is cut; STATE is still to be told */
#define TOLD		3	/* STATE is told; waits for the other's */
#define DEAD		4	/* the application has its errors */

typedef Path {
	byte q[2];		/* WRs of each end that were posted to it */
	byte x[2];		/* those of them that the other end has executed: its responder's PSN */
	byte recv[2];		/* receives of each end that it still has */
	byte cut;		/* mask of ends whose QP is in ERR */
};

typedef End {
	byte phase;
	byte epoch;
	byte path;		/* of this epoch; NONE: still to be made */
	byte posted, done;	/* WRs that landed; that completed with success */
	byte known;		/* known to be executed; READs have to be done again all the same */
	byte carrier, carried;	/* path of which it is not known yet what was executed, and the WRs */
	byte xpath, xmask;	/* the last path on which this end executed anything, and its final PSN */
	byte recvs;		/* receives that the application has posted */
	byte received;		/* receives completed since birth */
	byte spare;		/* receives read back that wait for a path */
	byte open;		/* links whose channel stands */
	byte held;		/* M_HELD_OPEN: links held for down with their channel open */
	byte fresh[NL];		/* a path made with the other end that is not used here; NONE: there is none */
	byte newest[NL];	/* path that was asked for or made last */
	byte asked;		/* links on which PATH is not answered yet */
	bit got;		/* the other's STATE of this epoch and path is here; it says: */
	byte gpath, gmask, gcount;
	byte target;		/* epoch that a drain leads to */
	byte wanted, wanted_from;	/* such a one that the other asks for, and the epoch to be left */
	bit said, heard;	/* DRAINED */
	byte over;		/* drains up to this one, of the present epoch, are off */
	bit off;		/* DRAINED is taken back, and what the other end says of it is missing */
	bit late_done;
	byte parked;		/* path that the late thread is going to post to */
	byte trapped;		/* WRs flushed late, not seen yet */
};

Path path[NL * NG];
End end[2];
byte dead_way[NL];		/* bit 0: what A sends is lost, bit 1: what B sends */
byte failures;			/* so often a link still dies */
byte repairs;			/* so often a dead link comes back */
byte suspects;			/* so often an end takes a link for down that is not, or is told to */
byte backs;			/* so often an end begins to go back, or to another link */
byte outs;			/* so often a drain takes too long */
/*                               kind   epoch path  xpath xmask received */
chan ch[NL * 2] = [DEPTH] of { mtype, byte, byte, byte, byte, byte };
#define TO(l, i)	ch[(l) * 2 + (i)]

/* what really happened, for the assertions only */
byte executed[2], answered[2];	/* WRs of each end: executed; READs whose data came */
bit no_link;			/* at some time no link stood at both ends */

HIDDEN byte w, m, c_, l_, e_, p_, xp_, xm_, rc_, k_, ok_;
HIDDEN mtype kind_;

#define REDONE(i)	(IS(M_READ_DONE) -> 0 : reads[i])
#define UNDONE(i)	(UPTO(end[i].posted) & ~UPTO(end[i].done))
#define TO_POST(i)	(UNDONE(i) & ~end[i].trapped & ~(end[i].known & ~REDONE(i)))	/* now or again */
#define CARRIES(i)	(path[end[i].path].q[i] & ~UPTO(end[i].done))
#define ALIVE(l)	(dead_way[l] == 0)
#define STANDS(l)	(ALIVE(l) && (end[0].open & BIT(l)) && (end[1].open & BIT(l)))
#define USABLE(i)	(end[i].open & ~end[i].held)
#define IS_CUT(p, i)	(path[p].cut & BIT(i))

inline look_at_links() {
	l_ = 0; ok_ = 0;
	do
	:: l_ < NL -> ok_ = ok_ || (STANDS(l_) && (USABLE(0) & USABLE(1) & BIT(l_))); l_++
	:: else -> break
	od;
	no_link = no_link || !ok_;
	l_ = 0; ok_ = 0
}

inline say(l, i, what, f_epoch, f_path, f_xpath, f_xmask, f_received) {
	if
	:: end[i].open & BIT(l) ->
		assert(nfull(TO(l, OTHER(i))));
		TO(l, OTHER(i))!what(f_epoch, f_path, f_xpath, f_xmask, f_received)
	:: else
	fi
}

/* Completions that no device tells of: what is known to be executed, and has nothing unfinished before it. */
inline complete_known(i) {
	do
	:: end[i].done < end[i].posted && (end[i].known & BIT(end[i].done) & ~REDONE(i)) ->
		assert(executed[i] & BIT(end[i].done));
		end[i].done++
	:: else -> break
	od;
	skip
}

/* Everything that one epoch leaves behind at one end; from here on the device executes nothing of this path. */
inline cut_off(i) {
	c_ = end[i].path;
	if
	:: c_ != NONE ->
		printf("%c: cuts path %d\n", NAME(i), c_);
		m = CARRIES(i);
		if
		:: m ->
			assert(end[i].carried == 0 || IS(M_NO_WAIT));	/* one unsettled path is all there ever is */
			end[i].carrier = c_;
			end[i].carried = m
		:: else
		fi;
		if
		:: path[c_].x[OTHER(i)] -> end[i].xpath = c_; end[i].xmask = path[c_].x[OTHER(i)]
		:: else
		fi;
		end[i].spare = end[i].spare | path[c_].recv[i];
		if
		:: IS(M_NOT_FLUSHED)
		:: else -> path[c_].recv[i] = 0
		fi;
		path[c_].cut = path[c_].cut | BIT(i);
		if
		:: path[c_].cut == 3 ->
			path[c_].q[0] = 0; path[c_].q[1] = 0;
			path[c_].x[0] = 0; path[c_].x[1] = 0
		:: else
		fi;
		end[i].path = NONE
	:: else
	fi;
	c_ = 0; m = 0;
	end[i].got = 0; end[i].gpath = 0; end[i].gmask = 0; end[i].gcount = 0;
	end[i].target = 0; end[i].said = 0; end[i].heard = 0; end[i].over = 0; end[i].off = 0
}

/* What the other end has executed of what is not known yet. */
inline learn(i, f_xpath, f_xmask, f_received) {
	if
	:: exact & BIT(i) ->
		m = (end[i].carried && f_xpath == end[i].carrier -> end[i].carried & f_xmask : 0)
	:: else ->	/* as many SENDs as were received, and what was posted before the last of them */
		k_ = 0; w = 0;
		do
		:: w < end[i].posted && k_ < f_received ->
			k_ = k_ + ((sends[i] >> w) & 1);
			w++
		:: else -> break
		od;
		m = (k_ > 0 && k_ == f_received -> end[i].carried & UPTO(w) : 0);
		w = 0; k_ = 0
	fi;
	if
	:: IS(M_NO_PSN) -> m = 0
	:: IS(M_ALL_EXECUTED) -> m = end[i].carried
	:: else
	fi;
	end[i].known = end[i].known | m;
	end[i].carrier = NONE;
	end[i].carried = 0;
	m = 0;
	complete_known(i)
}

inline say_gone(l, i) {
	if
	:: IS(M_NOT_GONE)
	:: else -> say(l, i, GONE, 0, NONE, end[i].xpath, end[i].xmask, end[i].received)
	fi
}

inline give_up(i) {
	cut_off(i);
	if
	:: end[i].phase != DEAD ->
		printf("%c: gives up, the application gets its errors\n", NAME(i));
		end[i].phase = DEAD;
		l_ = 0;
		do
		:: l_ < NL ->
			say_gone(l_, i);
			end[i].fresh[l_] = NONE;
			l_++
		:: else -> break
		od;
		l_ = 0;
		end[i].spare = 0; end[i].trapped = 0; end[i].parked = NONE; end[i].late_done = 1;
		end[i].wanted = 0; end[i].wanted_from = 0; end[i].asked = 0;
		end[i].carrier = NONE; end[i].carried = 0; end[i].known = 0
	:: else
	fi
}

/* Cuts, and goes to the next link in order whose channel stands; the one it is on comes last. */
inline change(i) {
	l_ = LINK(end[i].epoch);
	cut_off(i);
	k_ = 1; ok_ = 0;
	do
	:: k_ <= NL && !ok_ ->
		if
		:: (USABLE(i) & BIT((l_ + k_) % NL)) &&
		   (!IS(M_PATH_ONCE) || end[i].fresh[(l_ + k_) % NL] != NONE) -> ok_ = 1
		:: else -> k_++
		fi
	:: else -> break
	od;
	if
	:: ok_ ->
		end[i].epoch = (COUNT(end[i].epoch) + 1) * NL + (l_ + k_) % NL;
		assert(COUNT(end[i].epoch) <= MAX_CHANGES);
		end[i].phase = CUT;
		printf("%c: epoch %d, link %d\n", NAME(i), end[i].epoch, LINK(end[i].epoch))
	:: else ->
		assert(!quiet && no_link);
		give_up(i)
	fi;
	l_ = 0; k_ = 0; ok_ = 0
}

/* ---- the application ---- */

#define TRAPPED(i)	(!IS(M_TRAP_DROPPED) && end[i].trapped)
inline take_trap(i) {
	if
	:: TRAPPED(i) ->
		printf("%c: takes %x from the trap\n", NAME(i), end[i].trapped);
		end[i].trapped = 0;
		if
		:: end[i].phase == RUN -> path[end[i].path].q[i] = path[end[i].path].q[i] | TO_POST(i)
		:: else
		fi
	:: else
	fi
}

inline post(i) {
	printf("%c: posts %d\n", NAME(i), end[i].posted);
	if
	:: IS(M_TRAP_LATER)
	:: else -> take_trap(i)		/* what lies in the trap was posted before this */
	fi;
	if
	:: end[i].phase == RUN -> path[end[i].path].q[i] = path[end[i].path].q[i] | BIT(end[i].posted)
	:: else		/* kept */
	fi;
	end[i].posted++
}

/* A post that is kept while a late thread may still land on the path would be numbered before it, yet run after it: either
 * order is right, for the two calls overlap. Only the other one is looked at. */
#define OVERLAPS(i)	(end[i].phase == DRAINING && end[i].parked != NONE)
inline post_recv(i) {
	printf("%c: posts receive %d\n", NAME(i), end[i].recvs);
	if
	:: end[i].phase == CUT || (end[i].phase == DRAINING && IS(M_DRAIN_KEEPS_RECV)) ->
		end[i].spare = end[i].spare | BIT(end[i].recvs)
	:: else -> path[end[i].path].recv[i] = path[end[i].path].recv[i] | BIT(end[i].recvs)
	fi;
	end[i].recvs++
}

#define LATE_ONE(i)	((late & BIT(i)) && !end[i].late_done)
inline land(i) {
	printf("%c: a late thread posts %d to path %d\n", NAME(i), end[i].posted, end[i].parked);
	if
	:: !IS_CUT(end[i].parked, i) ->
		path[end[i].parked].q[i] = path[end[i].parked].q[i] | BIT(end[i].posted)
	:: else ->
		end[i].trapped = end[i].trapped | BIT(end[i].posted)
	fi;
	end[i].posted++;
	end[i].parked = NONE;
	end[i].late_done = 1
}

/* ---- the wire ---- */

/* d's oldest WR on path c_ that was not executed is. A sender has cut a path or not: the packets may be on their way. */
#define NEXT_OF(d, p)	(BIT(LOW(path[p].q[d] & ~path[p].x[d])))
#define EXECUTES(d, p)	((p) != NONE && (path[p].q[d] & ~path[p].x[d]) && (!IS_CUT(p, OTHER(d)) || IS(M_NOT_FLUSHED)) && \
			 !(dead_way[LINK_OF(p)] & BIT(d)) && \
			 (!(sends[d] & NEXT_OF(d, p)) || end[OTHER(d)].received < end[OTHER(d)].recvs))
inline execute(d) {
	w = LOW(path[c_].q[d] & ~path[c_].x[d]);
	printf("   %d of %c is executed on path %d\n", w, NAME(d), c_);
	if
	:: reads[d] & BIT(w)
	:: else ->
		if
		:: executed[d] & BIT(w) ->
			assert(!(once & BIT(d)) && !((sends[d] | atomics[d]) & BIT(w)))	/* twice */
		:: else ->
			assert((executed[d] >> w) == 0);			/* after a later one */
			assert((UPTO(w) & ~executed[d]) == 0)			/* before an earlier one */
		fi
	fi;
	if
	:: sends[d] & BIT(w) ->
		assert(path[c_].recv[OTHER(d)]);					/* no receive is there */
		assert(LOW(path[c_].recv[OTHER(d)]) == end[OTHER(d)].received);	/* receives in order, once */
		path[c_].recv[OTHER(d)] = path[c_].recv[OTHER(d)] & ~BIT(end[OTHER(d)].received);
		end[OTHER(d)].received++
	:: else
	fi;
	path[c_].x[d] = path[c_].x[d] | BIT(w);
	executed[d] = executed[d] | BIT(w);
	w = 0; c_ = 0
}

#define ACKNOWLEDGED(i)	((end[i].phase == RUN || end[i].phase == DRAINING) && CARRIES(i) && \
			 (path[end[i].path].x[i] & BIT(LOW(CARRIES(i)))) && !(dead_way[LINK_OF(end[i].path)] & BIT(OTHER(i))))
inline acknowledge(i) {
	printf("%c: %d is acknowledged\n", NAME(i), end[i].done);
	w = LOW(CARRIES(i));
	assert(w == end[i].done);						/* completions in posting order */
	assert(executed[i] & BIT(w));
	answered[i] = answered[i] | (BIT(w) & reads[i]);
	end[i].done++;
	w = 0;
	complete_known(i)
}

/* ---- the two ends ---- */

#define TELLS(i)	(end[i].phase == CUT && (end[i].open & BIT(LINK(end[i].epoch))) && \
			 (end[i].path != NONE || end[i].fresh[LINK(end[i].epoch)] != NONE))
inline tell(i) {
	l_ = LINK(end[i].epoch);
	if
	:: end[i].path == NONE -> end[i].path = end[i].fresh[l_]
	:: else
	fi;
	if
	:: end[i].path == end[i].fresh[l_] -> end[i].fresh[l_] = NONE
	:: else
	fi;
	if
	:: IS(M_RECV_AFTER_STATE)
	:: else -> path[end[i].path].recv[i] = end[i].spare; end[i].spare = 0
	fi;
	printf("%c: STATE epoch %d path %d: executed %x of path %d, %d received\n",
	       NAME(i), end[i].epoch, end[i].path, end[i].xmask, end[i].xpath, end[i].received);
	say(l_, i, STATE, end[i].epoch, end[i].path, end[i].xpath, end[i].xmask, end[i].received);
	end[i].phase = TOLD;
	if
	:: IS(M_NO_WAIT) -> end[i].got = 1
	:: else
	fi;
	l_ = 0
}

inline settle(i) {
	printf("%c: settles %x; executed was %x of path %d, %d received\n",
	       NAME(i), end[i].carried, end[i].gmask, end[i].gpath, end[i].gcount);
	if
	:: !(exact & BIT(i)) && (end[i].carried & atomics[i]) ->
		assert(!quiet);
		give_up(i)
	:: else ->
		learn(i, end[i].gpath, end[i].gmask, end[i].gcount);
		end[i].got = 0; end[i].gpath = 0; end[i].gmask = 0; end[i].gcount = 0;
		end[i].phase = RUN;
		path[end[i].path].q[i] = TO_POST(i);
		if
		:: IS(M_OWN_UNSETTLED) -> end[i].xpath = NONE; end[i].xmask = 0
		:: else
		fi;
		if
		:: end[i].wanted && (end[i].wanted_from == end[i].epoch || IS(M_DRAIN_FROM_ANY)) &&
		   KEY(end[i].wanted) > KEY(end[i].epoch) && end[i].wanted > end[i].over ->
			end[i].phase = DRAINING; end[i].target = end[i].wanted
		:: else
		fi;
		end[i].wanted = 0; end[i].wanted_from = 0
	fi
}

inline keep_state(i) {
	end[i].got = 1; end[i].gpath = xp_; end[i].gmask = xm_; end[i].gcount = rc_
}

/* The path that a STATE of our epoch names, unless it is used up here: then a newer one is made, and ours names that. */
inline take_path(i, l) {
	if
	:: p_ == end[i].fresh[l] -> end[i].path = p_; keep_state(i)
	:: p_ != end[i].fresh[l] && end[i].fresh[l] != NONE && IS(M_ANY_PATH) -> end[i].path = end[i].fresh[l]; keep_state(i)
	:: else
	fi;
	if
	:: end[i].held & BIT(l) -> change(i)
	:: else
	fi
}

inline receive_state(i, l) {
	if
	:: KEY(e_) > KEY(end[i].epoch) ->
		cut_off(i);
		end[i].epoch = e_;
		end[i].phase = CUT;
		take_path(i, l)
	:: KEY(e_) == KEY(end[i].epoch) && end[i].phase == CUT && end[i].path == NONE ->
		take_path(i, l)
	:: KEY(e_) == KEY(end[i].epoch) && (end[i].phase == CUT || end[i].phase == TOLD) && end[i].path != NONE ->
		if
		:: p_ == end[i].path || LINK_OF(p_) != LINK_OF(end[i].path) || IS(M_ANY_PATH) ->
			assert(p_ == end[i].path || mutant);
			keep_state(i)
		:: LINK_OF(p_) == LINK_OF(end[i].path) && p_ > end[i].path && !IS(M_ANY_PATH) ->
			cut_off(i);		/* ours was used up there */
			end[i].phase = CUT;
			take_path(i, l)
		:: else				/* theirs was used up here, and ours says so */
		fi
	:: else		/* an old one: who sent it gets ours */
		if
		:: IS(M_NO_EPOCH_CHECK) && (end[i].phase == CUT || end[i].phase == TOLD) -> keep_state(i)
		:: else
		fi
	fi
}

/* A drain ends without a change. */
inline stay(i) {
	end[i].phase = RUN;
	end[i].over = (end[i].target > end[i].over -> end[i].target : end[i].over);
	end[i].target = 0; end[i].said = 0; end[i].heard = 0; end[i].off = 0;
	path[end[i].path].q[i] = path[end[i].path].q[i] | TO_POST(i)
}

/* The other end stays, or will when it has heard that this one does. One that has cut says STATE instead. */
inline receive_off(i, l) {
	if
	:: rc_ == end[i].epoch && end[i].phase == DRAINING && e_ < end[i].target ->
		if
		:: xm_ -> say(l, i, OFF, e_, NONE, NONE, 0, end[i].epoch)
		:: else
		fi
	:: rc_ == end[i].epoch && !(end[i].phase == DRAINING && e_ < end[i].target) ->
		end[i].over = (e_ > end[i].over -> e_ : end[i].over);
		if
		:: end[i].phase == DRAINING -> stay(i)
		:: else
		fi;
		if
		:: end[i].wanted && end[i].wanted <= e_ -> end[i].wanted = 0; end[i].wanted_from = 0
		:: else
		fi;
		if
		:: xm_ -> say(l, i, OFF, end[i].over, NONE, NONE, 0, end[i].epoch)
		:: else
		fi
	:: else ->
		if
		:: end[i].wanted && end[i].wanted <= e_ && end[i].wanted_from == rc_ -> end[i].wanted = 0; end[i].wanted_from = 0
		:: else
		fi
	fi
}

inline receive(i, l) {
	TO(l, i)?kind_(e_, p_, xp_, xm_, rc_);
	if
	:: kind_ == STATE -> printf("%c: gets STATE epoch %d path %d, on link %d\n", NAME(i), e_, p_, l)
	:: kind_ == PATH -> printf("%c: gets PATH %d\n", NAME(i), p_)
	:: kind_ == GONE -> printf("%c: gets GONE, on link %d\n", NAME(i), l)
	:: kind_ == DRAIN -> printf("%c: gets DRAIN from epoch %d to %d, on link %d\n", NAME(i), rc_, e_, l)
	:: kind_ == DRAINED -> printf("%c: gets DRAINED from epoch %d to %d, on link %d\n", NAME(i), rc_, e_, l)
	:: kind_ == OFF -> printf("%c: gets OFF from epoch %d to %d, waits %d, on link %d\n", NAME(i), rc_, e_, xm_, l)
	fi;
	if
	:: end[i].phase == DEAD ->
		if
		:: kind_ == STATE || kind_ == PATH || kind_ == DRAIN || kind_ == OFF || IS(M_ECHO) -> say_gone(l, i)
		:: else
		fi
	:: else ->
		if
		:: kind_ == GONE ->
			cut_off(i);
			learn(i, xp_, xm_, rc_);
			give_up(i)
		:: kind_ == STATE -> receive_state(i, l)
		:: kind_ == PATH -> receive_path(i, l)
		:: kind_ == DRAIN ->
			if
			:: KEY(e_) <= KEY(end[i].epoch)
			:: KEY(e_) > KEY(end[i].epoch) && end[i].phase == RUN && rc_ == end[i].epoch && e_ <= end[i].over && !IS(M_DRAIN_REJOINED) ->
				say(l, i, OFF, end[i].over, NONE, NONE, 0, end[i].epoch)
			:: KEY(e_) > KEY(end[i].epoch) && end[i].phase == RUN && (rc_ == end[i].epoch || IS(M_DRAIN_FROM_ANY)) &&
			   (rc_ != end[i].epoch || e_ > end[i].over || IS(M_DRAIN_REJOINED)) ->
				end[i].phase = DRAINING; end[i].target = e_
			:: KEY(e_) > KEY(end[i].epoch) && end[i].phase == DRAINING ->
				if
				:: rc_ == end[i].epoch && e_ > end[i].target && !IS(M_DRAIN_FIRST) ->
					end[i].target = e_; end[i].said = 0; end[i].heard = 0; end[i].off = 0
				:: else
				fi
			:: else -> end[i].wanted = e_; end[i].wanted_from = rc_
			fi
		:: kind_ == DRAINED ->
			if
			:: end[i].phase == DRAINING && end[i].target == e_ && rc_ == end[i].epoch -> end[i].heard = 1
			:: else
			fi
		:: kind_ == OFF -> receive_off(i, l)
		fi
	fi;
	e_ = 0; p_ = 0; xp_ = 0; xm_ = 0; rc_ = 0; kind_ = 0
}

/* The channel of link l broke at i, or its heartbeat is missing, or somebody says that the link is down. */
#define WAITS(i)	(end[i].phase == CUT || end[i].phase == TOLD || end[i].phase == DRAINING)
#define SEES(i, l)	(!(blind & BIT(i)) || nempty(TO(l, OTHER(i))) || WAITS(i))
#define BROKEN(i, l)	((end[i].open & BIT(l)) && (!ALIVE(l) || !(end[OTHER(i)].open & BIT(l))) && SEES(i, l))
inline broken(i, l) {
	printf("%c: link %d is down\n", NAME(i), l);
	if
	:: IS(M_HELD_OPEN) && STANDS(l) -> end[i].held = end[i].held | BIT(l)
	:: else -> end[i].open = end[i].open & ~BIT(l)
	fi;
	look_at_links();
	end[i].fresh[l] = NONE;
	end[i].asked = end[i].asked & ~BIT(l);
	if
	:: end[i].wanted && LINK(end[i].wanted) == l -> end[i].wanted = 0; end[i].wanted_from = 0
	:: else
	fi;
	if
	:: end[i].phase == DEAD
	:: (end[i].phase == CUT || end[i].phase == TOLD) && LINK(end[i].epoch) == l -> change(i)
	:: end[i].phase == DRAINING && LINK(end[i].target) == l ->
		printf("%c: the drain is off\n", NAME(i));	/* the path is as good as before */
		stay(i)
	:: (end[i].phase == RUN || end[i].phase == DRAINING) && LINK(end[i].epoch) == l ->
		if
		:: USABLE(i) -> change(i)
		:: else			/* nowhere to go: whether it is broken will be seen by the device */
		fi
	:: else
	fi
}

/* The path's own error. */
#define RETRY_EXC(i)	((end[i].phase == RUN || end[i].phase == DRAINING) && CARRIES(i) && \
			 (!ALIVE(LINK_OF(end[i].path)) || IS_CUT(end[i].path, OTHER(i))))
inline retries_ran_out(i) {
	printf("%c: RETRY_EXC on path %d\n", NAME(i), end[i].path);
	if
	:: USABLE(i) -> change(i)
	:: else ->
		assert(!quiet && no_link);
		give_up(i)
	fi
}

/* Both ends make a path on link l, over its channel: the one that an end waits for, or a spare one. Who asks tells the
 * address of its half, and so does who answers; who has asked for the same path takes the other's question for the answer. */
#define NEEDS(i, l)	(end[i].phase == CUT && end[i].path == NONE && LINK(end[i].epoch) == (l))
#define ASKS(i, l)	(by_message && (end[i].open & BIT(l)) && end[i].fresh[l] == NONE && !(end[i].asked & BIT(l)) && !IS(M_PATH_ONCE) && \
			 (NEEDS(i, l) || (backs && end[i].phase != DEAD && LINK(end[i].epoch) != (l))))
inline ask(i, l) {
	if
	:: IS(M_REUSE) && path[end[i].newest[l]].cut == 3 -> path[end[i].newest[l]].cut = 0
	:: else -> end[i].newest[l]++
	fi;
	assert(LINK_OF(end[i].newest[l]) == (l));	/* NG: a bound of the model, not of the design */
	printf("%c: asks for path %d\n", NAME(i), end[i].newest[l]);
	end[i].asked = end[i].asked | BIT(l);
	say(l, i, PATH, 0, end[i].newest[l], NONE, 0, 0)
}
inline receive_path(i, l) {
	if
	:: p_ == end[i].newest[l] && (end[i].asked & BIT(l)) ->
		end[i].asked = end[i].asked & ~BIT(l);
		end[i].fresh[l] = p_
	:: p_ > end[i].newest[l] || (p_ == end[i].newest[l] && !(end[i].asked & BIT(l)) && !IS(M_PATH_ASKED_ONCE)) ->
		/* as new: who asked for it on a channel that broke has not made it */
		assert(p_ != end[i].path && !IS_CUT(p_, i) || IS(M_REUSE));
		end[i].newest[l] = p_;
		end[i].asked = end[i].asked & ~BIT(l);
		end[i].fresh[l] = p_;
		say(l, i, PATH, 0, p_, NONE, 0, 0)
	:: else		/* an old one: its sender gets ours */
	fi
}

/* The same in one step, which keeps searches small. */
#define MAKES(l)	(!by_message && STANDS(l) && end[0].phase != DEAD && end[1].phase != DEAD && !IS(M_PATH_ONCE) && \
			 ((NEEDS(0, l) && end[0].fresh[l] == NONE) || (NEEDS(1, l) && end[1].fresh[l] == NONE) || \
			  (backs && end[0].fresh[l] == NONE && end[1].fresh[l] == NONE && \
			   LINK(end[0].epoch) != (l) && LINK(end[1].epoch) != (l))))
inline make(l) {
	if
	:: IS(M_REUSE) && path[end[0].newest[l]].cut == 3 -> path[end[0].newest[l]].cut = 0
	:: else -> end[0].newest[l]++
	fi;
	assert(LINK_OF(end[0].newest[l]) == (l));	/* a bound, as above */
	printf("   path %d is made\n", end[0].newest[l]);
	end[1].newest[l] = end[0].newest[l];
	end[0].fresh[l] = end[0].newest[l];
	end[1].fresh[l] = end[0].newest[l]
}
#define REFUSES(i, l)	(!by_message && STANDS(l) && NEEDS(OTHER(i), l) && end[OTHER(i)].fresh[l] == NONE && \
			 end[i].phase == DEAD && empty(TO(l, OTHER(i))) && !IS(M_NOT_GONE))

/* The channel of a link that works again, when both ends have let go of the old one. */
#define REOPENS(l)	(ALIVE(l) && !(end[0].open & BIT(l)) && !(end[1].open & BIT(l)))
inline reopen(l) {
	printf("   a new channel on link %d\n", l);
	do
	:: nempty(TO(l, 0)) -> TO(l, 0)?kind_(e_, p_, xp_, xm_, rc_)
	:: nempty(TO(l, 1)) -> TO(l, 1)?kind_(e_, p_, xp_, xm_, rc_)
	:: empty(TO(l, 0)) && empty(TO(l, 1)) -> break
	od;
	e_ = 0; p_ = 0; xp_ = 0; xm_ = 0; rc_ = 0; kind_ = 0;
	end[0].fresh[l] = NONE;
	end[1].fresh[l] = NONE;
	end[0].open = end[0].open | BIT(l);
	end[1].open = end[1].open | BIT(l);
	if
	:: IS(M_PATH_ONCE) ->
		k_ = (end[0].newest[l] > end[1].newest[l] -> end[0].newest[l] : end[1].newest[l]) + 1;
		end[0].newest[l] = k_; end[0].fresh[l] = k_;
		end[1].newest[l] = k_; end[1].fresh[l] = k_;
		k_ = 0
	:: else
	fi
}

/* Going back, or to another link. */
#define BACK_TO(i, l)	(backs && end[i].phase == RUN && LINK(end[i].epoch) != (l) && (end[i].open & BIT(l)) && \
			 end[i].fresh[l] != NONE && !(end[i].wanted))
inline back(i, l) {
	backs--;
	end[i].phase = DRAINING;
	end[i].target = (COUNT((end[i].over > end[i].epoch -> end[i].over : end[i].epoch)) + 1) * NL + (l);
	printf("%c: goes back, to epoch %d\n", NAME(i), end[i].target);
	say(l, i, DRAIN, end[i].target, NONE, NONE, 0, end[i].epoch)
}
#define DRAINED_NOW(i)	(end[i].phase == DRAINING && !end[i].said && !CARRIES(i) && (end[i].parked == NONE || IS(M_DRAIN_UNSEEN)))
inline drained(i) {
	printf("%c: drained for epoch %d\n", NAME(i), end[i].target);
	end[i].said = 1;
	say(LINK(end[i].target), i, DRAINED, end[i].target, NONE, NONE, 0, end[i].epoch)
}
#define BOTH_DRAINED(i)	(end[i].phase == DRAINING && end[i].said && !end[i].off && (end[i].heard || IS(M_DRAIN_ALONE)))
inline go_back(i) {
	printf("%c: both are drained\n", NAME(i));
	e_ = end[i].target;
	cut_off(i);
	end[i].epoch = e_;
	end[i].phase = CUT;
	e_ = 0
}

/* It takes too long. The other end may hold this one for drained already, and cut. */
#define RUNS_OUT(i)	(outs && end[i].phase == DRAINING && !end[i].off)
inline run_out(i) {
	outs--;
	printf("%c: the drain to epoch %d takes too long\n", NAME(i), end[i].target);
	k_ = end[i].said && !IS(M_DRAIN_OUT_ALONE);
	say(LINK(end[i].target), i, OFF, end[i].target, NONE, NONE, k_, end[i].epoch);
	if
	:: k_ -> end[i].off = 1
	:: else -> stay(i)
	fi;
	k_ = 0
}

/* When nothing can happen any more. */
inline check(i) {
	d_step {
		assert((executed[i] & UPTO(end[i].done)) == UPTO(end[i].done));
		assert((answered[i] & reads[i]) == (UPTO(end[i].done) & reads[i]));
		assert(end[i].phase == DEAD ||
		       (end[i].phase == RUN && end[i].posted == wrs[i] && end[i].done == wrs[i] && end[i].trapped == 0));
		assert(end[i].received == ONES(executed[OTHER(i)] & sends[OTHER(i)]))
	}
}

#define IS_DONE(i)	(end[i].phase == RUN && end[i].done == wrs[i])
inline possible() {
	d_step {
		assert(!(IS(P_TWO_CHANGES) && IS_DONE(0) && IS_DONE(1) && COUNT(end[0].epoch) >= 2 && COUNT(end[1].epoch) >= 2));
		assert(!(IS(P_KNOWN_ONLY) && IS_DONE(0) && IS_DONE(1) && end[0].known));
		assert(!(IS(P_NOTHING_WRONG) && IS_DONE(0) && IS_DONE(1) && quiet && LINK(end[0].epoch) == 1));
		assert(!(IS(P_ERRORS) && end[0].phase == DEAD && end[1].phase == DEAD));
		assert(!(IS(P_SAVED_BY_A_NEW_PATH) && IS_DONE(0) && IS_DONE(1) && end[0].path == 1))
	}
}

/* ---- the steps ---- */

#define END_STEPS(i) \
	:: d_step { end[i].phase != DEAD && end[i].posted + LATE_ONE(i) < wrs[i] && !OVERLAPS(i) -> post(i) } \
	:: d_step { end[i].phase != DEAD && end[i].recvs < ONES(sends[OTHER(i)]) -> post_recv(i) } \
	:: d_step { LATE_ONE(i) && end[i].parked == NONE && end[i].phase == RUN -> \
		end[i].parked = end[i].path; printf("%c: a thread passes the check for path %d\n", NAME(i), end[i].parked) } \
	:: d_step { LATE_ONE(i) && end[i].parked == NONE -> end[i].late_done = 1 } \
	:: d_step { end[i].parked != NONE -> land(i) } \
	:: d_step { TRAPPED(i) -> take_trap(i) } \
	:: d_step { ACKNOWLEDGED(i) -> acknowledge(i) } \
	:: d_step { RETRY_EXC(i) -> retries_ran_out(i) } \
	:: d_step { TELLS(i) -> tell(i) } \
	:: d_step { IS(M_RECV_AFTER_STATE) && end[i].phase != CUT && end[i].spare && end[i].path != NONE -> \
		path[end[i].path].recv[i] = end[i].spare; end[i].spare = 0 } \
	:: d_step { end[i].phase == TOLD && end[i].got -> settle(i) } \
	:: d_step { DRAINED_NOW(i) -> drained(i) } \
	:: d_step { BOTH_DRAINED(i) -> go_back(i) } \
	:: d_step { RUNS_OUT(i) -> run_out(i) } \
	:: d_step { EXECUTES(i, end[OTHER(i)].path) -> c_ = end[OTHER(i)].path; execute(i) } \
	:: d_step { end[i].path != end[OTHER(i)].path && EXECUTES(i, end[i].path) -> c_ = end[i].path; execute(i) }

#define CHANNEL_STEPS(i, l) \
	:: d_step { (end[i].open & BIT(l)) && !(dead_way[l] & BIT(OTHER(i))) && nempty(TO(l, i)) -> receive(i, l) } \
	:: d_step { BROKEN(i, l) -> broken(i, l) } \
	:: d_step { suspects && STANDS(l) && end[i].phase != DEAD -> suspects--; broken(i, l) } \
	:: d_step { ASKS(i, l) -> ask(i, l) } \
	:: d_step { REFUSES(i, l) -> say_gone(l, i) } \
	:: d_step { BACK_TO(i, l) -> back(i, l) }

#define LINK_STEPS(l) \
	CHANNEL_STEPS(0, l) \
	CHANNEL_STEPS(1, l) \
	:: d_step { failures && ALIVE(l) -> \
		failures--; dead_way[l] = 3; printf("   link %d dies\n", l); look_at_links() } \
	:: d_step { one_way && failures && ALIVE(l) -> \
		failures--; dead_way[l] = 1; printf("   link %d dies for what A sends\n", l); look_at_links() } \
	:: d_step { one_way && failures && ALIVE(l) -> \
		failures--; dead_way[l] = 2; printf("   link %d dies for what B sends\n", l); look_at_links() } \
	:: d_step { repairs && !ALIVE(l) -> repairs--; dead_way[l] = 0; printf("   link %d works again\n", l) } \
	:: d_step { REOPENS(l) -> reopen(l) } \
	:: d_step { MAKES(l) -> make(l) }

c_decl {
\#include <stdlib.h>
/* The configuration comes from the environment, so that one compiled search does for all. */
static int conf(const char *name, int otherwise)
{
	const char *value = getenv(name);
	return value ? atoi(value) : otherwise;
}
};

#ifdef SHORTEST
#define C(name)	now.name
#else
#define C(name)	name
#endif

init {
	d_step {
		c_code {
			C(wrs)[0] = conf("A_WRS", 3);		C(wrs)[1] = conf("B_WRS", 1);
			C(sends)[0] = conf("A_SENDS", 5);	C(sends)[1] = conf("B_SENDS", 1);
			C(reads)[0] = conf("A_READS", 0);	C(reads)[1] = conf("B_READS", 0);
			C(atomics)[0] = conf("A_ATOMICS", 0);	C(atomics)[1] = conf("B_ATOMICS", 0);
			C(later)[0] = conf("A_LATER", 0);	C(later)[1] = conf("B_LATER", 0);
			C(exact) = conf("EXACT", 3);
			C(one_way) = conf("ONE_WAY", 0);
			C(by_message) = conf("BY_MESSAGE", 0);
			C(ahead) = conf("AHEAD", 1);
			C(late) = conf("LATE", 0);
			C(blind) = conf("BLIND", 0);
			C(mutant) = conf("MUTANT", 0);
			now.failures = conf("FAILURES", 2);
			now.repairs = conf("REPAIRS", 1);
			now.suspects = conf("SUSPECTS", 0);
			now.backs = conf("BACKS", 0);
			now.outs = conf("OUTS", 0);
		};
		quiet = failures == 0 && suspects == 0;
		once = (quiet || IS(M_RESEND_AS_EXACT) -> 3 : exact);
		k_ = 0;
		do
		:: k_ < 2 ->
			end[k_].path = 0;			/* link 0, first path */
			end[k_].epoch = 0;
			end[k_].open = UPTO(NL);
			end[k_].xpath = NONE; end[k_].carrier = NONE; end[k_].parked = NONE;
			end[k_].fresh[0] = NONE;
			l_ = 1;
			do
			:: l_ < NL ->
				end[k_].fresh[l_] = (ahead -> l_ * NG : NONE);
				end[k_].newest[l_] = l_ * NG;
				l_++
			:: else -> break
			od;
			end[k_].recvs = ONES(sends[OTHER(k_)]) - later[k_];
			path[0].recv[k_] = UPTO(end[k_].recvs);
			k_++
		:: else -> break
		od;
		k_ = 0; l_ = 0
	}
	do
	END_STEPS(0)
	END_STEPS(1)
	LINK_STEPS(0)
	LINK_STEPS(1)
#if NL > 2
	LINK_STEPS(2)
#endif
	:: else -> break
	od;
	check(0);
	check(1);
	possible()
}
