/* Whole drafts, for those who keep hidden states elsewhere than one behind the other. */
#ifndef TLT_EAGLE_H
#define TLT_EAGLE_H

#include "tlt.h"

/* tlt_eagle_draft with the hidden state of pair i at row state_of[i] of `states`; NULL: at row i. */
int tlt_eagle_draft_at(const TltEagle *e, const TltEagleStep *s, const int32_t *state_of, const TltDraft *d,
                       int threads);

#endif
